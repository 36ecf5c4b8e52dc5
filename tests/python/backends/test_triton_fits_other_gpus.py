"""The Triton kernels compile for other GPUs and fit into their shared memory. The tests do not run them."""

import os
from pathlib import Path

import pytest
import torch

from flash_dmattn._core import availability
from python_process import run_python

triton = pytest.importorskip("triton")
TARGETS = {"MI300": ("hip", "gfx942", "64", 64), "RTX 30": ("cuda", "86", "32", 99)}  # KB last


# make release-check also compiles the kernels for AMD, and in double. Either takes most of the time.
IS_RELEASE = "FLASH_DMATTN_TEST_RELEASE" in os.environ
PRECISIONS = "all" if IS_RELEASE else "fp32"
LARGEST_TILES = [("RTX 30", "float16", 256), ("MI300", "bfloat16", 128)][: 2 if IS_RELEASE else 1]


@pytest.mark.slow
@pytest.mark.parametrize("gpu, dtype, head_dim", LARGEST_TILES)
def test_kernels_compile_and_fit(gpu, dtype, head_dim, monkeypatch):
    *target, kilobytes = TARGETS[gpu]
    monkeypatch.setattr(torch.version, "hip", "7.0" if target[0] == "hip" else None)
    backend = availability._backend_of_triton(triton)
    if "too old" in backend.reason:
        pytest.skip(backend.reason)
    script = Path(__file__).parents[1] / "support" / "runtime" / "compiled_triton.py"
    without = dict.fromkeys(("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION"))
    done = run_python(script, *target, dtype, head_dim, PRECISIONS, **without)
    assert "Warning" not in done.stderr, done.stderr[-3000:]
    shared = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in shared} == {
        "range_kernel", "forward_kernel", "delta_kernel", "query_gradient_kernel",
        "key_gradient_kernel", "bias_gradient_kernel",
    }  # fmt: skip
    for name, size in shared:
        assert int(size) <= 1024 * kilobytes, f"{name}: {size} bytes"
