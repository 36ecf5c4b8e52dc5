"""The options of the benchmark."""

import argparse
import os

from ..usage import between, device, input_file, output_file, picture_file
from .cases import OLD_NAMES

# Here, so that the command's help needs neither a GPU nor the backends.
BACKENDS = ("cuda", "triton", "cpu")
RIVALS = ("sdpa", "fa2", "cudnn", "flex", "fa3", "fa4")
CASES = (
    "dense", "head_dims", "dma", "groups", "scaling", "windows", "global", "sliding", "documents",
    "dense_masks", "decode",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_CASES = ("dense", "dma", "scaling")
LONGEST = 2**24  # keys; cases of less than that may need more memory than there is, and say so
MOST_REPEATS = 1000
MOST_THREADS = 4 * (os.cpu_count() or 1)


def add_to(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--case", "--cases", nargs="+", choices=(*CASES, *OLD_NAMES), default=DEFAULT_CASES, metavar="CASE",
        help=f"any of {', '.join(CASES)}; default: {' '.join(DEFAULT_CASES)}")  # fmt: skip
    add("--backend", nargs="+", choices=BACKENDS, help="ours; default: the best one that runs here")
    add("--against", type=_rivals, metavar="RIVALS",
        help=f"rivals to compare with, from {','.join(RIVALS)}, or none; default: torch's own that need no compilation")  # fmt: skip
    add(
        "--dtype",
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        help="default: bfloat16, on the CPU float32 too",
    )
    add("--device", type=_device, metavar="{cpu,cuda}", help="default: the GPU if there is one")
    add(
        "--length",
        nargs="+",
        type=between(1, LONGEST),
        metavar="N",
        help=f"instead of the lengths of the cases; {LONGEST} at most",
    )
    add(
        "--window",
        nargs="+",
        type=between(1, LONGEST),
        metavar="W",
        help=f"instead of the windows of the cases; {LONGEST} at most",
    )
    add("--repeats", type=between(1, MOST_REPEATS), default=5,
        help=f"turns, of which the median counts; default: 5, {MOST_REPEATS} at most")  # fmt: skip
    add("--threads", type=between(1, MOST_THREADS),
        help=f"of the CPU; default: torch's, {MOST_THREADS} at most here")  # fmt: skip
    add("--json", type=output_file, metavar="FILE", help="write all results there")
    add("--commit", default="unknown", help="of the sources; written into the file")
    add(
        "--plot",
        type=picture_file,
        metavar="FILE",
        help="draw time and memory against N and against w",
    )
    add("--from", dest="records", nargs="+", type=input_file, metavar="RECORD",
        help="measure nothing; show and draw what --json wrote")  # fmt: skip


def _device(text: str) -> str:
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected cpu or cuda")
    return device(text)


def _rivals(text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in RIVALS:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected any of {','.join(RIVALS)}")
    return names
