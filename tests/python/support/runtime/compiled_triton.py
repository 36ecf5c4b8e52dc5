"""Compiles the Triton kernels for a GPU that is not in this machine: python compiled_triton.py hip gfx942 64 bfloat16 128 [fp32]

With fp32 it leaves out the kernels that recompute in double, which take two thirds of the time, and ptxas, which refuses
nothing more once the shared memory is known. It prints the name of every kernel and the bytes of shared memory that it takes.
It runs in a separate process, because Triton decides on import whether kernels are interpreted, and takes the GPU from one
driver.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from flash_dmattn import sliding_window
from flash_dmattn._backends.triton import configs, launch

LENGTH = 256


class Driver:
    """The part of a driver that Triton compiles with."""

    def __init__(self, target):
        self.get_current_target = lambda: target
        self.get_current_device = self.get_current_stream = lambda *device: 0


def main(kind, architecture, warp, dtype, head_dim, precisions="all"):
    architecture = int(architecture) if kind == "cuda" else architecture
    driver.set_active(Driver(GPUTarget(kind, architecture, int(warp))))
    launch_kernel, add_stages = JITFunction.run, CUDABackend.add_stages

    def add_stages_before_ptxas(self, stages, *rest):
        add_stages(self, stages, *rest)
        stages["cubin"] = lambda ptx, metadata: b""

    if precisions == "fp32":
        CUDABackend.add_stages = add_stages_before_ptxas

    def compile_alone(self, *arguments, **options):
        if precisions == "fp32" and options.get("FP64"):
            return
        kernel = launch_kernel(self, *arguments, **options | {"warmup": True})
        print(self.fn.__name__, kernel.metadata.shared, flush=True)

    JITFunction.run = compile_alone
    configs.has_little_shared_memory = lambda device: True
    q = torch.randn(1, LENGTH, 2, int(head_dim)).to(getattr(torch, dtype))
    k = q[:, :, :1].contiguous()
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    bias = torch.zeros(mask.shape, dtype=q.dtype)
    # With intervals, the backward's tiles are the same and take no more memory.
    for key_intervals in (sliding_window(LENGTH, 64).intervals, None):
        problem = launch.Problem(q, k, k.clone(), mask, bias, key_intervals, [], True, 0.1, 1.0)
        out, *rest = launch.forward(problem, True)
    launch.backward(problem, q, out, *rest, None, True, [True] * 4)


if __name__ == "__main__":
    main(*sys.argv[1:])
