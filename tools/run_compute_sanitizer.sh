#!/usr/bin/env bash
# run_compute_sanitizer.sh TOOL TEST ARGUMENT...: runs a test executable under a tool of compute-sanitizer. Fails where the tool finds
# something or the test fails. Without the tool or a GPU it says so and is reported as skipped (exit status 77).
#
# racecheck leaves out the main loops of sm90. It orders a read before the write that comes after it by an mbarrier only where the
# thread that reads arrives there itself. There one lane arrives for a warp, after a __syncwarp; the tool does not follow that, nor a
# bar.sync before the arrival (CUDA 13.0). test_cuda_races compares the bits of a thousand launches of these kernels instead.
set -euo pipefail

[ $# -ge 2 ] || { echo "run_compute_sanitizer.sh: got $# arguments, expected a tool and a test executable" >&2; exit 2; }
tool=$1
shift
sanitizer=$(command -v compute-sanitizer || command -v /usr/local/cuda/bin/compute-sanitizer) || {
  echo "SKIPPED $tool: there is no compute-sanitizer on the PATH or in /usr/local/cuda/bin"
  exit 77
}
"$1" --gtest_brief=1 --gtest_filter=-'*'  # no test: exits with 77 and the reason where the backend cannot run
exclude=()
if [ "$tool" = racecheck ]; then
  exclude=(--kernel-name-exclude kernel_substring=4sm9013ForwardKernel --kernel-name-exclude kernel_substring=4sm9014BackwardKernel)
fi
exec "$sanitizer" --tool "$tool" "${exclude[@]}" --error-exitcode 9 "$@"
