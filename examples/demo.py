"""Trains transformers' Doge model on the Python standard library, writes text with it, and draws what it learned.

python examples/demo.py [--steps 400] [--output demo-output]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from command_line import between, device

LONGEST = 32768  # at this context length the picture of keys takes 8 GB of memory


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        from doge_demo.run import run

        return run(options)
    except ModuleNotFoundError as missing:
        print(f"The demo needs {missing.name}: see `make demo`.", file=sys.stderr)
    except KeyboardInterrupt:
        kept = f" What is finished is in {options.output}/." if options.output.is_dir() else ""
        print(f"\nInterrupted.{kept}", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"--output: {error}", file=sys.stderr)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        smaller = "expected smaller values of --batch-size and --context"
        print(f"The demo has run out of memory: {smaller}.", file=sys.stderr)
    return 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=between(1), default=400, help="training steps")
    add(
        "--seconds",
        type=between(1),
        default=150,
        help="training ends after this time at the latest",
    )
    add("--context", type=between(2, LONGEST), default=2048, help="bytes per sequence")
    add("--window", type=between(1, LONGEST), default=256, help="keys that a query keeps")
    add("--batch-size", type=between(1, 1024), default=1, help="sequences per step")
    add("--device", type=device, default="auto", help="a device of torch; auto: the GPU if there is one (in bfloat16)")  # fmt: skip
    add("--output", type=Path, default=Path("demo-output"), help="folder for text and pictures")
    add("--seed", type=between(0), default=0, help="of initial weights, batches and generated text")
    return parser.parse_args(arguments)


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an error means that memory ran out. On the CPU torch has no error class for this."""
    import torch

    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


if __name__ == "__main__":
    sys.exit(main())
