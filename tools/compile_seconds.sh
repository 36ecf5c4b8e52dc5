#!/usr/bin/env bash
# compile_seconds.sh BUILD_FOLDER: the seconds of the last compilation of each CUDA file (0 from ccache), the slowest
# first.
set -euo pipefail

awk -F '\t' '$4 ~ /flash_dmattn_(cuda|sm[a-z0-9_]*)\.dir\// { seconds[$4] = ($2 - $1) / 1000 }
  END { for (file in seconds) { name = file; sub(/.*flash_dmattn_/, "", name); sub(/\.dir\//, ": ", name); sub(/\.o$/, "", name)
        printf "%7.1f s  %s\n", seconds[file], name } }' "$1/.ninja_log" | sort -rn
