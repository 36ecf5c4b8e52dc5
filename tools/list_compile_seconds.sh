#!/usr/bin/env bash
# list_compile_seconds.sh BUILD_FOLDER: prints how many seconds each CUDA file took to compile last, slowest first (0: taken from ccache).
set -euo pipefail

[ $# = 1 ] || { echo "list_compile_seconds.sh: got $# arguments, expected a build folder" >&2; exit 2; }

awk -F '\t' '$4 ~ /flash_dmattn_(cuda|sm[a-z0-9_]*)\.dir\// { seconds[$4] = ($2 - $1) / 1000 }
  END { for (file in seconds) { name = file; sub(/.*flash_dmattn_/, "", name); sub(/\.dir\//, ": ", name); sub(/\.o$/, "", name)
        printf "%7.1f s  %s\n", seconds[file], name } }' "$1/.ninja_log" | sort -rn
