"""The options of the demo."""

import argparse
from pathlib import Path

from ..usage import between, device, output_folder, positive, seed

LONGEST = 32768  # of which the picture of keys takes 8 GB of memory


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options to its parser."""
    add = parser.add_argument
    add("--steps", type=positive, default=400, help="training steps")
    add("--seconds", type=positive, default=150, help="training ends after this time at the latest")
    add(
        "--context",
        type=between(2, LONGEST),
        default=2048,
        help=f"bytes per sequence, 2 to {LONGEST}",
    )
    add(
        "--window",
        type=between(1, LONGEST),
        default=256,
        metavar="W",
        help=f"keys that a query keeps, {LONGEST} at most",
    )
    add(
        "--batch-size",
        type=between(1, 1024),
        default=1,
        metavar="B",
        help="sequences per step, 1024 at most",
    )
    add(
        "--device",
        type=device,
        default="auto",
        help="where to train: a device of torch; auto is the GPU where there is one (in bfloat16)",
    )
    add(
        "--output",
        type=output_folder,
        default=Path("demo-output"),
        help="folder for text and pictures",
    )
    add("--seed", type=seed, default=0, help="of initial weights, batches and generated text")
