"""Calculates, without measuring, how many bytes context parallelism moves and how long that takes, for 2 to 64 ranks.

The numbers are per rank and layer, for 16-bit tensors: the bytes of the busiest rank, and the time of the exchange as a share of the
time of attention, if no computation hides it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import NamedTuple

# Useful FLOP/s, within 1 % of per_query B1 H16 Hkv2 N32768 D128 w2048 on an H200: 533 and 467 TFLOP/s in docs/benchmarks.md.
FORWARD, BACKWARD = 533e12, 471e12
LENGTHS = (2**17, 2**20, 2**22)
RANKS = ((2, 2), (8, 8), (16, 8), (64, 8))  # (ranks, ranks per node)
# (bytes per second and GPU, latency in seconds of a collective that depends on the previous one)
NVLINK, INFINIBAND = (350e9, 25e-6), (45e9, 80e-6)
NOTE = 8  # bytes of a key's score and position


class Hop(NamedTuple):
    """The bytes that one collective moves within a node and between nodes."""

    within: float
    between: float

    def bytes(self) -> float:
        return self.within + self.between

    def seconds(self) -> float:
        links = [(n, link) for n, link in ((self.within, NVLINK), (self.between, INFINIBAND)) if n]
        return max((n / bandwidth + latency for n, (bandwidth, latency) in links), default=0.0)


@dataclass(frozen=True)
class Model:
    heads: int
    heads_kv: int
    head_dim: int
    window: int

    def row(self) -> int:
        """Returns the bytes of one token's keys and values."""
        return self.heads_kv * self.head_dim * 2 * 2

    def compute(self, length: int, ranks: int) -> tuple[float, float]:
        """Returns the seconds of forward and of backward on one rank."""
        products = length / ranks * min(self.window, length) * self.heads * self.head_dim
        return 4 * products / FORWARD, 10 * products / BACKWARD

    def exchanges(
        self, length: int, ranks: int, node: int
    ) -> dict[str, tuple[list[Hop], list[Hop]]]:
        """Returns the successive collectives of forward and of backward for each form of exchange. node: ranks per node."""
        share, n, nodes = (ranks - 1) / ranks, length / ranks, ranks // node

        def to_all(total: float) -> Hop:
            others = max(ranks - 1, 1)
            return Hop(total * (node - 1) / others, total * (ranks - node) / others)

        winners = min(self.window, n)
        places = min(self.window, (ranks - 1) * winners)
        all_keys = share * length * self.row()
        # With several nodes, the row is that of a node's last rank, whose neighbour is on another node.
        ring = Hop(all_keys, 0) if nodes == 1 else Hop(0, all_keys)
        heads = share * n * self.head_dim * 2

        def both_ways(hops, parts: int) -> tuple[list[Hop], list[Hop]]:
            """Returns the collectives of forward and backward.

            hops: maps the bytes of a row to its collectives. A row has the keys and values of a token and its notes, one for each of
            the parts that share a head. A note's gradient has half its bytes. Sums that return to their owner are in float32.
            """
            notes = max(1, parts // self.heads_kv) * self.heads_kv * NOTE
            sums, *partial = hops(self.row() + notes / 2)
            if partial:
                sums = hops(2 * self.row() + notes / 2)[0]
            return hops(self.row() + notes), [*reversed(partial), sums]

        return {
            "all keys (ring, all-gather)": ([ring], [ring]),
            "heads for tokens (Ulysses)": (
                [to_all(heads * (self.heads + 2 * self.heads_kv)), to_all(heads * self.heads)],
                [to_all(heads * (self.heads + 2 * self.heads_kv)), to_all(heads * 2 * (self.heads + self.heads_kv))],
            ),
            "winners, direct": both_ways(lambda row: [to_all((ranks - 1) * winners * row)], 1),
            "winners, two hops": both_ways(
                lambda row: [to_all(share * winners * row), to_all(share * places * row)], ranks
            ),
        }  # fmt: skip


def main(options: argparse.Namespace) -> int:
    model = Model(options.heads, options.heads_kv, options.head_dim, options.window)
    for ranks, node in RANKS:
        print(f"\n{ranks} ranks, {node} of a node")
        titles = " | ".join(
            f"N {length // 1024}k: MB, between nodes; ms; share of attention" for length in LENGTHS
        )
        print(f"| exchange | {titles} |\n|---|" + "---|" * len(LENGTHS))
        for name in model.exchanges(LENGTHS[0], ranks, node):
            cells = [cell(model, name, length, ranks, node) for length in LENGTHS]
            print(f"| {name} | " + " | ".join(cells) + " |")
    return 0


def cell(model: Model, name: str, length: int, ranks: int, node: int) -> str:
    ways = model.exchanges(length, ranks, node)[name]
    total, between, ms = (
        " / ".join(f"{sum(map(quantity, hops)) * scale:.{digits}f}" for hops in ways)
        for quantity, scale, digits in (
            (Hop.bytes, 1e-6, 1),
            (lambda hop: hop.between, 1e-6, 1),
            (Hop.seconds, 1e3, 2),
        )
    )
    seconds = sum(hop.seconds() for hops in ways for hop in hops)
    share = 100 * seconds / sum(model.compute(length, ranks))
    return f"{total}, {between}; {ms}; {share:.1f} %"
