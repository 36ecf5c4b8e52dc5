"""python -m flash_dmattn {info,check,bench,demo}"""

import argparse
import os
import platform
import sys
from pathlib import Path

import torch

import flash_dmattn

from .benchmark import options as bench_options
from .check import options as check_options
from .demo import options as demo_options

_INSTRUCTION_SETS = (
    "sse4_2", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "amx_bf16",
    "neon", "asimd", "sve", "bf16",
)  # fmt: skip


def info() -> None:
    """Prints the version, the backends that run here, and why the others do not."""
    print(f"flash_dmattn {flash_dmattn.__version__}")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print("\nbackends, the preferred one first")
    for backend in flash_dmattn.backends():
        print(f"  {backend.name:<10} {'yes' if backend.available else 'no':<4} {backend.reason}")
    print("\nCPU")
    print(f"  instruction sets  {' '.join(_instruction_sets()) or 'unknown'}")
    print(f"  threads           {torch.get_num_threads()}")
    cap = os.environ.get("FLASH_DMATTN_MAX_ISA")
    if cap:
        print(f"  FLASH_DMATTN_MAX_ISA = {cap}")


def _instruction_sets() -> list[str]:
    """The instruction sets of this machine that the kernels use, by the names of Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return [platform.machine()]
    lines = cpuinfo.read_text().splitlines()
    flags = next((x for x in lines if x.startswith(("flags", "Features"))), "").split()
    return [name for name in _INSTRUCTION_SETS if name in flags]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_dmattn", description=flash_dmattn.__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="version, backends and why others cannot run, CPU")
    demo = commands.add_parser(
        "demo",
        help="train transformers' Doge model on the Python standard library",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo_options.add_to(demo)
    check = commands.add_parser(
        "check",
        help="compare this installation with double precision",
        epilog=check_options.EXIT_STATUS,
    )
    check_options.add_to(check)
    bench = commands.add_parser("bench", help="time and memory beside the rivals that run here")
    bench_options.add_to(bench)
    parsed = parser.parse_args(arguments)
    if parsed.command == "info":
        info()
        return 0
    if parsed.command == "check":
        from .check.run import check as run_check

        return run_check(parsed)
    if parsed.command == "bench":
        from .benchmark.run import bench as run_bench

        return run_bench(parsed)
    try:
        from .demo.run import run

        run(parsed)
    except ModuleNotFoundError as missing:
        print(f"The demo needs {missing.name}: pip install 'flash-dmattn[demo]'.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = f" What is finished is in {parsed.output}/." if parsed.output.is_dir() else ""
        print(f"\nInterrupted.{kept}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
