#!/usr/bin/env bash
# compute_sanitizer.sh TOOL TEST ARGUMENT...: runs a test executable under a tool of compute-sanitizer. Fails where the tool finds
# something or the test fails. Without the tool or a GPU it says so and is reported as skipped (exit status 77).
set -euo pipefail

tool=$1
shift
sanitizer=$(command -v compute-sanitizer || command -v /usr/local/cuda/bin/compute-sanitizer) || {
  echo "SKIPPED $tool: there is no compute-sanitizer on the PATH or in /usr/local/cuda/bin"
  exit 77
}
"$1" --gtest_brief=1 --gtest_filter=-'*'  # no test: exits with 77 and the reason where the backend cannot run
exec "$sanitizer" --tool "$tool" --error-exitcode 9 "$@"
