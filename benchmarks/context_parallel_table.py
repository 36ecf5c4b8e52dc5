"""The bytes that context parallelism moves and their time, on paper, for 2, 8 and 64 ranks.

    python benchmarks/context_parallel_table.py [--heads 16 --heads-kv 8 --head-dim 128 --window 2048]

For each rank and layer, in 16 bits: bytes of the busiest rank, and the share of them in the time of attention where nothing hides them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

FORWARD, BACKWARD = 533e12, 471e12  # useful FLOP/s of an H200 with w 2048, docs/benchmarks.md
LENGTHS = (2**17, 2**20, 2**22)
# Bytes a second of a GPU, and seconds of a collective that depends on the one before: NVLink within 8 GPUs, InfiniBand among 64.
LINKS = {2: (350e9, 15e-6), 8: (350e9, 25e-6), 64: (45e9, 80e-6)}
NOTE = 8  # bytes of a score and a position


@dataclass(frozen=True)
class Model:
    heads: int
    heads_kv: int
    head_dim: int
    window: int

    def row(self) -> int:
        """Bytes of one token's keys and values."""
        return self.heads_kv * self.head_dim * 2 * 2

    def compute(self, length: int, ranks: int) -> tuple[float, float]:
        """Seconds of forward and backward on one rank."""
        pairs = length / ranks * min(self.window, length) * self.heads * self.head_dim
        return 4 * pairs / FORWARD, 10 * pairs / BACKWARD

    def exchanges(self, length: int, ranks: int) -> dict[str, tuple[float, float, int, int]]:
        """Bytes forward and backward, and successive collectives forward and backward."""
        share, n = (ranks - 1) / ranks, length / ranks
        winners = min(self.window, n)
        places = min(self.window, (ranks - 1) * winners)
        notes = winners * self.heads_kv * NOTE
        copies = max(1, ranks // self.heads_kv)  # of notes, where ranks share a head
        both = share * (winners + places)
        all_keys = share * length * self.row()
        heads = share * n * self.head_dim * 2
        return {
            "all keys (ring, all-gather)": (all_keys, all_keys, 1, 1),
            "heads for tokens (Ulysses)": (
                heads * 2 * (self.heads + self.heads_kv),
                heads * (3 * self.heads + 4 * self.heads_kv),
                2,
                2,
            ),
            "winners, direct": (
                (ranks - 1) * (winners * self.row() + notes),
                (ranks - 1) * (winners * self.row() + notes / 2),
                1,
                1,
            ),
            "winners, two hops": (
                both * (self.row() + copies * self.heads_kv * NOTE),
                both * (self.row() + copies * self.heads_kv * NOTE / 2),
                2,
                2,
            ),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=2048)
    model = Model(**vars(parser.parse_args()))
    for ranks, (bandwidth, latency) in LINKS.items():
        print(f"\n{ranks} ranks at {bandwidth / 1e9:.0f} GB/s, {latency * 1e6:.0f} us a collective")
        titles = " | ".join(
            f"N {length // 1024}k: MB; ms; share of attention" for length in LENGTHS
        )
        print(f"| exchange | {titles} |\n|---|" + "---|" * len(LENGTHS))
        for name in model.exchanges(LENGTHS[0], ranks):
            cells = []
            for length in LENGTHS:
                forward, backward, hops, hops_back = model.exchanges(length, ranks)[name]
                times = (
                    forward / bandwidth + hops * latency,
                    backward / bandwidth + hops_back * latency,
                )
                attention = sum(model.compute(length, ranks))
                cells.append(
                    f"{forward / 1e6:.1f} / {backward / 1e6:.1f}; {times[0] * 1e3:.2f} / {times[1] * 1e3:.2f}; "
                    f"{100 * sum(times) / attention:.1f} %"
                )
            print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
