"""Helpers of the tests on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flash_dmattn import backends
from flash_dmattn.check.cases import to_device
from flash_dmattn.kernels import kernel_names
from python_process import run_python

_CUDA = next(b for b in backends() if b.name == "cuda")
REASON_WITHOUT_GPU = "" if _CUDA.available else _CUDA.reason
_marked = partial(pytest.param, marks=pytest.mark.gpu)


def where_there_is_a_gpu(*values):
    """Returns the values as parameters of tests on a GPU, none where there is no GPU. A tuple has one value for each argument."""
    return [
        _marked(*v) if isinstance(v, tuple) else _marked(v)
        for v in values
        if not REASON_WITHOUT_GPU
    ]


devices = pytest.mark.parametrize("device", ["cpu", *where_there_is_a_gpu("cuda")])


def on_gpu(value, device="cuda"):
    """Copies a tensor (keeping strides), problem or case to GPU memory."""
    return to_device(value, device)


def on_cpu(result):
    """Copies a result of the checks to CPU memory."""
    moved = {n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in vars(result).items()}
    return type(result)(**moved)


def capture(step, error_mode="global"):
    """Runs `step` once and captures it in a graph on the current device. Returns the graph and the tensors that it writes.

    error_mode: the threads whose forbidden calls fail during the capture.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # torch's own stream for captures belongs to the device that was current at the first capture.
    with torch.cuda.graph(graph, stream=side, capture_error_mode=error_mode):
        captured = step()
    return graph, captured


def assert_passes_in_the_older_family(file, names):
    """Runs the tests of a file with these names in a separate process, because families are capped once per process.

    A build for newer GPUs alone leaves out the kernels of the older family that newer ones replace
    (FLASH_DMATTN_CUDA_ALL_KERNELS).
    """
    if not any(name.startswith("sm80 forward bf16 d64 ") for name in kernel_names("cuda")):
        pytest.skip("the build has no kernels of the older family for this GPU")
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", names)
    run_python(*arguments, FLASH_DMATTN_CUDA_FAMILY="sm80")
