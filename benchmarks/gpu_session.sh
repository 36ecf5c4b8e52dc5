#!/usr/bin/env bash
# Everything that proves the CUDA backend on a GPU, built on one machine and run on another that has torch, pytest, ctest and
# compute-sanitizer, and needs no compiler:
#
#   benchmarks/gpu_session.sh pack FOLDER [BUILD [BEFORE_TREE BEFORE_BUILD]]
#   FOLDER/gpu_session.sh run RESULTS [STEP...]
#
# BUILD (build/cuda): a build folder with FLASH_DMATTN_TORCH, FLASH_DMATTN_TESTS and, for the kernels of GPUs with less shared memory,
# FLASH_DMATTN_CUDA_ALL_KERNELS. BEFORE_TREE, BEFORE_BUILD: sources and build folder of the commit that `compare` compares with.
# FOLDER is packed: about 20 MB for one architecture. Steps, in the order in which they are run; the first three at once, each on a
# GPU of its own where there are several:
#   cpp         C++ tests: ctest --label-regex cuda, with their variants
#   python      Python tests
#   sanitizers  ctest --label-regex sanitizer: small cases under compute-sanitizer
#   compare     the rows of README's table on both libraries, in random order; alone
#   speed       times, memory, rivals, which become the record, and a training; alone
# Only on request, as they compile for minutes:
#   portable    tests of the Triton and FlexAttention backends
#   rivals      dense, dynamic_mask, sliding, dense_masks, scaling and windows, with Triton and FlexAttention; alone
#   decode      a token at a time: attention over caches, and a whole Doge after 4,096 and 524,288 tokens; alone
# Each step ends within ten minutes on an H200 with 16 processor cores. RESULTS gets a log of each part, table.tsv, compare.json and
# record.json, whose place is benchmarks/records/<machine>/<date>-torch.json, and training.json; rivals: triton.json and sweeps.json;
# decode: decode.json, token_4096.json and token_524288.json. All of them are records (benchmarks/harness/record.py).
set -euo pipefail

# on_gpu N COMMAND...: runs COMMAND with GPU N first in CUDA_VISIBLE_DEVICES.
on_gpu() {
  local gpus n=$1
  shift
  gpus=$(nvidia-smi --list-gpus | wc -l)
  CUDA_VISIBLE_DEVICES=$(seq 0 $((gpus - 1)) | awk -v n="$n" -v gpus="$gpus" '{ print ($1 + n) % gpus }' | paste -sd,) "$@"
}

# copy_package TREE BUILD TO: a Python package and its library.
copy_package() {
  mkdir -p "$3"
  cp -r "$1/python" "$3/"
  cp "$1/tests/cases/attention.csv" "$3/python/flash_dmattn/check/"
  strip -o "$3/_C.so" "$2/bindings/torch/_C.so"
  git -C "$1" rev-parse --short HEAD >"$3/commit"
}

pack() {
  local folder=$1 build=${2:-build/cuda} root work test
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  mkdir -p "$folder"
  folder=$(cd "$folder" && pwd)
  cd "$root"
  build=$(cd "$build" && pwd)
  work=$(mktemp -d)
  mkdir "$work/tests_cuda"
  for test in "$build"/tests/cuda/test_*; do
    [ -f "$test" ] && [ -x "$test" ] && strip -o "$work/tests_cuda/${test##*/}" "$test"
  done
  # The entries of ctest, with paths that `run` fills in.
  sed -e "s#$build/tests/cuda#@HERE@/tests_cuda#g; s#$root/#@HERE@/#g; /_BACKTRACE_TRIPLES/s/_BACKTRACE_TRIPLES \"[^\"]*\"//" \
    "$build/tests/cuda/CTestTestfile.cmake" >"$work/tests_cuda/CTestTestfile.cmake.in"
  copy_package "$root" "$build" "$work/after"
  [ $# -lt 4 ] || copy_package "$3" "$4" "$work/before"
  cp -r tests benchmarks examples tools pyproject.toml "$work/"
  rm -rf "$work/benchmarks/records"
  find "$work" -name __pycache__ -prune -exec rm -rf {} +
  # Flags: the compiler, its options and the architectures.
  {
    "$(sed -n 's/^CMAKE_CUDA_COMPILER:.*=//p' "$build/CMakeCache.txt")" --version | sed -n 's/.*release.*, V/nvcc /p'
    sed -nE 's/^(CMAKE_CUDA_FLAGS_RELEASE|FLASH_DMATTN_CUDA_ARCHITECTURES):[A-Z]*=//p' "$build/CMakeCache.txt"
  } | paste -sd, - >"$work/build"
  # Every test program has all kernels. The dictionary spans two programs, and there are no threads, which divide the input.
  XZ_OPT="--lzma2=preset=1,dict=256MiB" tar -C "$work" -cJf "$folder/session.tar.xz" .
  rm -rf "$work"
  cp "${BASH_SOURCE[0]}" "$folder/"
  du -sh "$folder"
}

# part NAME COMMAND...: runs in RESULTS/NAME.log; remembers how it ended and how long it took.
part() {
  local name=$1 began=$SECONDS status=0
  shift
  # Interrupted, pytest still names what has failed.
  timeout --signal INT --kill-after 20 550 "$@" >"$results/$name.log" 2>&1 || status=$?
  # ctest passes where every entry was skipped; on a GPU there is no reason to.
  if [ $status = 0 ] && grep -aqE '\*\*\*Skipped' "$results/$name.log"; then status=skipped; fi
  printf '%s\t%s\t%s s\t%s\n' "$name" "$([ $status = 0 ] && echo passed || echo "FAILED ($status)")" \
    $((SECONDS - began)) "$(last_words "$results/$name.log")" >>"$results/table.tsv"
}

# The last line of pytest or ctest, with the number of tests that ctest skipped.
last_words() {
  local skipped
  skipped=$(grep -acE '\*\*\*Skipped' "$1" || true)
  grep -aE 'tests passed|[0-9]+ passed|[0-9]+ failed|[Ee]rror' "$1" | tail -1 | tr -d '\n'
  [ "$skipped" = 0 ] || printf ', %s skipped' "$skipped"
}

cpp() {
  part cpp ctest --test-dir "$folder/tests_cuda" --label-regex '^cuda$' --parallel 6 --output-on-failure --no-tests=error
}

sanitizers() {
  part sanitizers ctest --test-dir "$folder/tests_cuda" --label-regex '^sanitizer$' --parallel 6 --output-on-failure \
    --no-tests=error
}

python() {
  # Four processes where pytest-xdist is there, which do not spin on each other's cores.
  local pytest=(env OMP_NUM_THREADS=2 python3 -m pytest -v -p no:cacheprovider --rootdir "$folder" -c "$folder/pyproject.toml"
    --tb short -o faulthandler_timeout=120)
  local many=() tests=$folder/tests/python
  if python3 -c 'import xdist' 2>/dev/null; then many=(-n 4); fi
  part python "${pytest[@]}" "${many[@]}" --ignore="$tests/gpu/test_beyond_31_bits.py" \
    "$tests"/{gpu,api/test_availability.py,tools/test_demo.py}
  part python_large "${pytest[@]}" "$tests/gpu/test_beyond_31_bits.py"
}

# Every test compiles kernels of its own: as many processes as there are cores.
portable() {
  part portable bash -c 'cd "$1" && python3 -m pytest --collect-only -q tests/python/backends |
    grep :: | xargs -d "\n" -P "$(nproc)" -n 12 python3 -m pytest -q -p no:cacheprovider' - "$folder"
}

# bench PART RECORD OPTION...: a record of benchmarks/bench.py.
bench() {
  local name=$1 record=$2
  shift 2
  part "$name" python3 "$folder/benchmarks/bench.py" run --commit "$(cat "$folder/after/commit")" --json "$results/$record.json" "$@"
}

compare() {
  if [ ! -e "$folder/before" ]; then
    printf 'compare\tFAILED\t0 s\tnothing to compare with was packed\n' >>"$results/table.tsv"
    return
  fi
  part compare python3 "$folder/benchmarks/bench.py" compare "$folder/before" "$folder/after" --json "$results/compare.json"
}

rivals() {
  bench bench_triton triton --case dense dynamic_mask sliding dense_masks --side cuda triton fa2 cudnn sdpa flex
  bench bench_sweeps sweeps --case scaling windows --side cuda triton sdpa flex
}

decode() {
  bench decode decode --case decode
  # Each context has its own program, so that a slow long context does not delay the short one.
  local context
  for context in 4096 524288; do
    bench "token_$context" "token_$context" --case token --length "$context"
  done
}

speed() {
  # Rivals outside torch only where they are installed.
  local sides=(cuda fa2 cudnn flex)
  if python3 -c 'import fa3_fwd_interface' 2>/dev/null; then sides+=(fa3); fi
  if python3 -c 'import flash_attn.cute' 2>/dev/null; then sides+=(fa4); fi
  if python3 -c 'import fla' 2>/dev/null; then sides+=(fla); fi
  bench speed record --case dense head_dims dynamic_mask groups sliding documents dense_masks forgetting selection memory \
    --side "${sides[@]}" --repeats 9
  bench training training --case training
}

run() {
  local packed
  packed=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  mkdir -p "$1"
  results=$(cd "$1" && pwd)
  shift
  [ $# -gt 0 ] || set -- cpp python sanitizers compare speed
  folder=${TMPDIR:-/tmp}/flash_dmattn_session
  rm -rf "$folder"
  mkdir "$folder"
  tar -C "$folder" -xJf "$packed/session.tar.xz"
  sed "s#@HERE@#$folder#g" "$folder/tests_cuda/CTestTestfile.cmake.in" >"$folder/tests_cuda/CTestTestfile.cmake"
  : >"$results/table.tsv"
  export PYTHONPATH="$folder/after/python" FLASH_DMATTN_LIBRARY="$folder/after/_C.so" PYTHONDONTWRITEBYTECODE=1
  export FLASH_DMATTN_CASES_DIR="$folder/tests/cases"
  local step background=()
  for step in "$@"; do
    case $step in
      compare | speed | rivals | decode)
        wait "${background[@]}"
        "$step"
        ;;
      cpp | python | sanitizers | portable)
        on_gpu ${#background[@]} "$step" &
        background+=($!)
        ;;
      *)
        echo "no step $step" >&2
        return 2
        ;;
    esac
  done
  wait
  if [ -e "$results/record.json" ]; then
    python3 "$folder/benchmarks/bench.py" add "$results/record.json" --build "$folder/build" --tests "$results/table.tsv"
  fi
  cat "$results/speed.log" "$results/compare.log" 2>/dev/null || true
  awk -F '\t' '{ printf "%-16s %-12s %6s  %s\n", $1, $2, $3, $4 }' "$results/table.tsv"
  ! grep -q FAILED "$results/table.tsv"
}

"$@"
