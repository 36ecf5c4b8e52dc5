#!/usr/bin/env bash
# test_torchtitan.sh: the tests of dynamic masks in TorchTitan, which is installed into an environment of its own (build/torchtitan)
# in front of the packages of the Python that is first on the PATH, torch among them. Says why where it cannot run them.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=build/torchtitan

if [ ! -e "$folder/ready" ]; then
  rm -rf "$folder"
  python -m venv --without-pip "$folder"
  python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(echo "$folder"/lib/python*/site-packages)/base.pth"
  python -m pip --disable-pip-version-check --quiet --python "$folder/bin/python" install --no-compile torchtitan==0.3.0 || {
    echo "SKIPPED test-torchtitan: pip cannot install torchtitan 0.3.0"
    exit 0
  }
  touch "$folder/ready"
fi
export PATH=$PWD/$folder/bin:$PATH OMP_NUM_THREADS=1
"$folder/bin/python" -m pytest tests/python/integrations/test_torchtitan.py "$@"
