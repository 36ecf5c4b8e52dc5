"""FLASH_DMATTN_CUDA_FAMILY sets the newest family of CUDA kernels that a process may use, once per process."""

import os
import subprocess
import sys

import pytest

from flash_dmattn.kernels import kernel_names

PROGRAM = "from flash_dmattn.kernels import kernel_names; print(*kernel_names('cuda'), sep='\\n')"


def run_with_cap(cap):
    env = {**os.environ, "FLASH_DMATTN_CUDA_FAMILY": cap}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)


def family_of(kernel):
    return kernel.split()[0]


def test_family_cap_keeps_itself_and_older_ones():
    families = list(dict.fromkeys(map(family_of, kernel_names("cuda"))))  # the newest first
    for i, cap in enumerate(families):
        run = run_with_cap(cap)
        assert run.returncode == 0, run.stderr
        assert set(map(family_of, run.stdout.splitlines())) == set(families[i:])


@pytest.mark.parametrize("cap", ["sm75", "SM80", "sm80 "])
def test_unknown_family_cap_raises_naming_families(cap):
    run = run_with_cap(cap)
    assert run.returncode != 0
    assert f"FLASH_DMATTN_CUDA_FAMILY: got {cap}, expected" in run.stderr
    assert "sm90, sm80" in run.stderr
