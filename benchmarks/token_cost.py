"""A generated token of the demo's model as the text grows: eager attention over a full cache, and ours over a cache of w slots.

    python benchmarks/token_cost.py [--threads 1] [--rounds 5] [--record]

What `python -m flash_dmattn demo` measures, on the CPU and of random weights: the time of the fastest token of several rounds of 12,
which other programs of the machine disturb least, and the memory of the cache. --record writes records/<machine>/<date>-token.json,
from which report.py makes the table of docs/generation.md.
"""

import argparse
import math

import torch

from bench import commit, place
from flash_dmattn.benchmark.record import about, write
from flash_dmattn.demo import token_cost
from flash_dmattn.demo.training import make_model

CONTEXT, WINDOW = 2048, 256  # the demo's
IMPLEMENTATIONS = ("eager", "flash_dmattn")


def measure(model, rounds):
    """A row for every implementation and length: the fastest of all rounds, which take turns."""
    rows = {}
    for turn in range(rounds):
        for name in IMPLEMENTATIONS:
            for cost in token_cost.measure_tokens(model, name, seconds=math.inf, seed=turn):
                row = {
                    "who": name,
                    "tokens_before": cost.length,
                    "ms": round(1e3 * cost.seconds, 3),
                    "tokens_per_s": round(cost.per_second, 1),
                    "cache_mib": round(cost.mebibytes, 2),
                }
                key = name, cost.length
                rows[key] = min(rows.get(key, row), row, key=lambda one: one["ms"])
    return [rows[key] for key in sorted(rows)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="write a record")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = make_model(CONTEXT, WINDOW)
    record = about("cpu", commit(), options.rounds) | {
        "method": f"wall time of the fastest token of {options.rounds} rounds of 12, each behind a text that was read "
        "anew; float32, batch 1",
        "model": {
            name: getattr(model.config, name)
            for name in (
                "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
                "keep_window_size",
            )
        },
        "token": measure(model, options.rounds),
    }  # fmt: skip
    print(f"{'':<14}{'before':>8}{'ms':>9}{'tokens/s':>10}{'cache MiB':>11}")
    for row in record["token"]:
        print(
            f"{row['who']:<14}{row['tokens_before']:>8}{row['ms']:>9.2f}{row['tokens_per_s']:>10.0f}"
            f"{row['cache_mib']:>11.1f}"
        )
    if options.record:
        path = place("token", record["machine"])
        write(path, record)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
