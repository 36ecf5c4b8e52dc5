#!/usr/bin/env bash
# check_wheel.sh WHEEL TORCH...: installs a wheel together with each of these versions of torch, in a fresh virtual environment, and
# compares the backends that run with double precision there. PYTHON chooses the interpreter.
set -euo pipefail

if [ $# -lt 2 ] || [ ! -f "$1" ]; then
  echo "check_wheel.sh: got ${1:-nothing} and $(($# ? $# - 1 : 0)) versions, expected a wheel and versions of torch" >&2
  exit 2
fi
wheel=$(realpath "$1")
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in "$@"; do
  "${PYTHON:-python3}" -m venv --clear "$folder/venv"
  "$folder/venv/bin/pip" install --quiet "torch==$version" "$wheel"
  cd "$folder"  # where nothing but the installed package can be imported
  venv/bin/python -c 'import torch, flash_dmattn; print(f"torch {torch.__version__}, flash-dmattn {flash_dmattn.__version__}")'
  venv/bin/python -m flash_dmattn info
  venv/bin/python -m flash_dmattn check
  cd - >/dev/null
done
