"""`python -m flash_dmattn info`: prints the installation's backends, and the kernel of a given problem."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path

import torch

import flash_dmattn

from .._core.availability import Backend, backends, gpu, is_available
from ..kernels import kernel_names, recorded_kernels

_INSTRUCTION_SETS = (
    "sse4_2", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "amx_bf16",
    "neon", "asimd", "sve", "bf16",
)  # fmt: skip
_SETTINGS = ("FLASH_DMATTN_MAX_ISA", "FLASH_DMATTN_CUDA_FAMILY", "FLASH_DMATTN_MAX_SHARED_KB")
_COMPILED = ("cuda", "cpu", "reference")  # backends of the C++ library


def add_to(parser: argparse.ArgumentParser) -> None:
    listed = parser.add_mutually_exclusive_group()
    listed.add_argument("--kernels", action="store_true", help="list all kernels that can run here")
    listed.add_argument("--case", help="the kernels of a case of the case table, by its name")


def info(options: argparse.Namespace) -> int:
    """Prints the version, the backends that run here, and why the others do not; or kernels."""
    if options.kernels:
        for backend in _compiled_backends():
            print(*kernel_names(backend.name), sep="\n")
        return 0
    if options.case is not None:
        return _print_kernels_of(options.case)
    print(f"flash_dmattn {flash_dmattn.__version__}")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print("\nbackends, the preferred one first")
    for backend in backends():
        print(f"  {backend.name:<10} {'yes' if backend.available else 'no':<4} {backend.reason}")
    print(
        f"  float32 on CUDA GPUs: {'triton' if is_available('triton') else 'not available (needs triton)'}"
    )
    print("\nCPU")
    print(f"  instruction sets  {' '.join(_instruction_sets()) or 'unknown'}")
    print(f"  threads           {torch.get_num_threads()}")
    for name in _SETTINGS:
        if os.environ.get(name):
            print(f"  {name} = {os.environ[name]}")
    return 0


def _compiled_backends() -> list[Backend]:
    return [b for b in backends() if b.available and b.name in _COMPILED]


def _print_kernels_of(name: str) -> int:
    from .cases import CASES, make_case, run, to_device

    if name not in CASES:
        print(
            f"--case: got {name!r}, expected a name of tests/cases/attention.csv", file=sys.stderr
        )
        return 2
    for backend in _compiled_backends():
        case = to_device(make_case(CASES[name]), gpu() if backend.name == "cuda" else "cpu")
        try:
            with recorded_kernels() as kernels:
                run(case, flash_dmattn.flash_dmattn_func_auto(backend.name))
            lines = kernels
        except (ValueError, NotImplementedError, RuntimeError) as refusal:
            lines = [str(refusal)]
        print(backend.name)
        print(*(f"  {line}" for line in lines), sep="\n")
    return 0


def _instruction_sets() -> list[str]:
    """Returns the instruction sets of this machine that the kernels use, as named in /proc/cpuinfo."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return [platform.machine()]
    lines = cpuinfo.read_text().splitlines()
    flags = next((x for x in lines if x.startswith(("flags", "Features"))), "").split()
    return [name for name in _INSTRUCTION_SETS if name in flags]
