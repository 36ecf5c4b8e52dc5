#!/usr/bin/env bash
# Everything that proves the CUDA backend on a GPU, built on one machine and run on another that has torch
# and no compiler:
#
#   benchmarks/gpu_session.sh pack FOLDER [BUILD]      collects what is needed (BUILD: build/cuda)
#   benchmarks/gpu_session.sh run FOLDER RESULTS [STEP...]
#
# BUILD is a build folder with FLASH_DMATTN_CUDA, FLASH_DMATTN_TORCH and FLASH_DMATTN_TESTS on. Steps:
#   correctness   C++ and Python tests
#   sanitizers    compute-sanitizer, small cases; beside the tests
#   speed         times, memory, rivals, training; alone
#   portable      only on request, as it compiles for minutes: tests of the Triton and FlexAttention backends
#   rivals        only on request, for as long: all cases of `python -m flash_dmattn bench`, FlexAttention too; alone
# The first three take two and a half minutes on an H200 with 32 processor cores.
# RESULTS gets a log of each part and record.json, whose place is benchmarks/records/<machine>/<date>-torch.json;
# rivals: triton.json and sweeps.json.
set -euo pipefail

pack() {
  local folder=$1 build=${2:-build/cuda} root python test
  root=$(cd "$(dirname "$0")/.." && pwd)
  cd "$root"
  rm -rf "$folder"
  mkdir -p "$folder/bin" "$folder/site"
  for test in test_cuda_attention test_cuda_tile_lists test_cuda_slots test_cuda_ranks test_cuda_selection; do
    strip -o "$folder/bin/$test" "$build/tests/cuda/$test"
  done
  strip -o "$folder/bin/_C.so" "$build/bindings/torch/_C.so"
  cp -r python tests benchmarks pyproject.toml "$folder/"
  python=$(command -v python)
  # pytest and what it needs are plain Python: they run under another version too.
  "$python" - "$folder/site" <<'PYTHON'
import importlib.util, shutil, sys
from pathlib import Path
for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
    place = Path(importlib.util.find_spec(name).origin).parent
    shutil.copytree(place, Path(sys.argv[1]) / name, ignore=shutil.ignore_patterns("__pycache__"))
PYTHON
  find "$folder" -name __pycache__ -prune -exec rm -rf {} +
  rm -rf "$folder/benchmarks/records"
  git rev-parse --short HEAD >"$folder/commit"
  # Flags: the compiler, its options and the architectures.
  {
    "$(sed -n 's/^CMAKE_CUDA_COMPILER:.*=//p' "$build/CMakeCache.txt")" --version | sed -n 's/.*release.*, V/nvcc /p'
    sed -nE 's/^(CMAKE_CUDA_FLAGS_RELEASE|FLASH_DMATTN_CUDA_ARCHITECTURES):[A-Z]*=//p' "$build/CMakeCache.txt"
  } | paste -sd, - >"$folder/build"
  du -sh "$folder"
}

# part NAME COMMAND...: runs in RESULTS/NAME.log; remembers how it ended and how long it took.
part() {
  local name=$1 began=$SECONDS status=0
  shift
  timeout 300 "$@" >"$results/$name.log" 2>&1 || status=$?
  printf '%s\t%s\t%s s\t%s\n' "$name" "$([ $status = 0 ] && echo passed || echo "FAILED ($status)")" \
    $((SECONDS - began)) "$(grep -aE 'PASSED|FAILED|passed|failed|ERROR SUMMARY|RACECHECK SUMMARY' "$results/$name.log" | tail -1)" \
    >>"$results/table.tsv"
}

correctness() {
  local test
  part test_cuda_attention "$folder/bin/test_cuda_attention" --gtest_brief=1 &
  (for test in test_cuda_tile_lists test_cuda_slots test_cuda_ranks test_cuda_selection; do part $test "$folder/bin/$test" --gtest_brief=1; done) &
  (
    # Four processes where pytest-xdist is there, which do not spin on each other's cores.
    local pytest=(env OMP_NUM_THREADS=2 python3 -m pytest -q -p no:cacheprovider --rootdir "$folder")
    local many=()
    if python3 -c 'import xdist' 2>/dev/null; then many=(-n 4); fi
    part python "${pytest[@]}" "${many[@]}" --ignore="$folder/tests/python/gpu/test_beyond_31_bits.py" \
      "$folder"/tests/python/{gpu,api/test_availability.py,tools/test_demo.py}
    part python_large "${pytest[@]}" "$folder/tests/python/gpu/test_beyond_31_bits.py"
  ) &
  wait
}

# Every kernel at a small size: dtypes, head-dim buckets, with and without a list, pairs that lie in fours and others, tails.
small_attention='*/plain_bf16:*/plain_f16:*/dim_24_bf16:*/dim_80_f16:*/dim_128_bf16:*/dim_256_bf16:*/dim_256_f16:*/group_4_bf16:*/per_query_bf16:*/global_f16:*/mask_bhqk_bias_bhqk_bf16:*/mask_b1qk_bias_bv1k_f16:*/fours_bvqk_bf16:*/fours_bhqk_dim_128_bf16:*/fours_bhqk_dim_80_f16:*/fours_nothing_visible_bf16:*/bytes_bvqk_bf16:*/bytes_bhqk_dim_128_f16:*/bytes_blocks_bf16:*/bytes_bias_masks_bf16:*/bytes_gaps_dim_128_f16:*/size_1x1_bf16:*/size_7x5_f16:*/softcap_bf16:*/layout_padded_bf16:*/propagate_bf16'

sanitizers() {
  local tool
  for tool in memcheck racecheck synccheck initcheck; do
    part "${tool}_attention" compute-sanitizer --tool $tool --error-exitcode 9 "$folder/bin/test_cuda_attention" \
      --gtest_brief=1 "--gtest_filter=$small_attention" &
    part "${tool}_attention_99kb" env FLASH_DMATTN_MAX_SHARED_KB=99 compute-sanitizer --tool $tool --error-exitcode 9 \
      "$folder/bin/test_cuda_attention" --gtest_brief=1 \
      '--gtest_filter=*/dim_128_bf16:*/dim_256_f16:*/fours_bvqk_bf16:*/fours_bhqk_dim_128_bf16:*/per_query_bf16' &
    part "${tool}_selection" compute-sanitizer --tool $tool --error-exitcode 9 "$folder/bin/test_cuda_selection" \
      --gtest_brief=1 '--gtest_filter=Small*' &
    part "${tool}_ranks" compute-sanitizer --tool $tool --error-exitcode 9 "$folder/bin/test_cuda_ranks" \
      --gtest_brief=1 '--gtest_filter=Small*' &
    for test in tile_lists slots; do
      part "${tool}_$test" compute-sanitizer --tool $tool --error-exitcode 9 "$folder/bin/test_cuda_$test" \
        --gtest_brief=1 '--gtest_filter=Small*' &
    done
  done
  part memcheck_check_mode env FLASH_DMATTN_CHECK_FINITE=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$folder/bin/test_cuda_attention" --gtest_brief=1 '--gtest_filter=*/plain_bf16:*/group_4_bf16' &
  wait
}

# Every test compiles kernels of its own: as many processes as there are cores.
portable() {
  part portable bash -c 'cd "$1" && python3 -m pytest --collect-only -q tests/python/backends |
    grep :: | xargs -d "\n" -P "$(nproc)" -n 12 python3 -m pytest -q -p no:cacheprovider' - "$folder"
}

rivals() {
  local bench=(python3 -m flash_dmattn bench --backend cuda triton --commit "$(cat "$folder/commit")")
  part bench_triton "${bench[@]}" --case dense dma sliding pairs --against fa2,cudnn,sdpa,flex --json "$results/triton.json"
  part bench_sweeps "${bench[@]}" --case scaling windows --against sdpa,flex --json "$results/sweeps.json"
}

speed() {
  part through_torch python3 "$folder/benchmarks/cuda/through_torch.py" --commit "$(cat "$folder/commit")" \
    --record "$results/record.json"
}

# What was built and what the tests and sanitizers said, beside the times.
add_to_record() {
  python3 - "$results" "$folder/build" <<'PYTHON'
import json, sys
from pathlib import Path
results, build = map(Path, sys.argv[1:])
record = json.loads((results / "record.json").read_text())
record["build"] = build.read_text().strip()
names = ("part", "result", "took", "last_words")
rows = (results / "table.tsv").read_text().splitlines()
record["tests"] = [dict(zip(names, row.split("\t"), strict=True)) for row in rows]
(results / "record.json").write_text(json.dumps(record, indent=1) + "\n")
PYTHON
}

run() {
  folder=$(cd "$1" && pwd)
  results=$2
  shift 2
  [ $# -gt 0 ] || set -- correctness sanitizers speed
  mkdir -p "$results"
  : >"$results/table.tsv"
  export PYTHONPATH="$folder/python:$folder/site" FLASH_DMATTN_LIBRARY="$folder/bin/_C.so" PYTHONDONTWRITEBYTECODE=1
  export FLASH_DMATTN_CASES_DIR="$folder/tests/cases"
  local step background=()
  for step in "$@"; do
    if [ "$step" = speed ] || [ "$step" = rivals ]; then
      wait "${background[@]}"
      "$step"
    else
      "$step" &
      background+=($!)
    fi
  done
  wait
  if [ -e "$results/record.json" ]; then add_to_record; fi
  grep -ahE ' cuda | fa2 | cudnn |selection|extra_mb|on_top|bits_per_byte_of' "$results/through_torch.log" 2>/dev/null || true
  awk -F '\t' '{ printf "%-24s %-12s %6s  %s\n", $1, $2, $3, $4 }' "$results/table.tsv"
  ! grep -q FAILED "$results/table.tsv"
}

"$@"
