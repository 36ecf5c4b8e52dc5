"""The options of the demo."""

import argparse
from pathlib import Path

from ..usage import device, output_folder, positive, seed


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options to its parser."""
    add = parser.add_argument
    add("--steps", type=positive, default=400, help="training steps")
    add("--seconds", type=positive, default=150, help="training ends after this time at the latest")
    add("--context", type=positive, default=2048, help="bytes per sequence")
    add("--window", type=positive, default=256, metavar="W", help="keys that a query keeps")
    add("--batch-size", type=positive, default=1, metavar="B", help="sequences per step")
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
