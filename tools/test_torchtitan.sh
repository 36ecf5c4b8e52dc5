#!/usr/bin/env bash
# test_torchtitan.sh ARGUMENT...: runs the tests of dynamic masks in TorchTitan, and a test that TorchTitan has, with our attention. It
# installs TorchTitan into an environment of its own (build/torchtitan) in front of the packages of the Python that is first on the PATH,
# torch among them. If pip finds no TorchTitan, it prints so and skips the tests.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
name=test-torchtitan folder=build/torchtitan
source tools/own_environment.sh

if [ ! -e "$folder/ready" ]; then
  create_environment
  install torchtitan==0.3.0
  touch "$folder/ready"
fi
run_tests tests/python/integrations/test_torchtitan.py tests/peers/test_torchtitan_flex_cp.py "$@"
