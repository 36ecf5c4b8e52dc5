"""The calculated bytes of context parallelism equal those that ranks count."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bench
from harness import exchange_table
from ranks_as_threads import run_in_threads

ROOT = Path(__file__).parents[3]
NAMES = {'`"two_hops"`': "winners, two hops"}
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.mark.parametrize(
    ("exchange", "name", "ranks", "node"),
    [
        ("direct", "winners, direct", 2, 2),
        ("direct", "winners, direct", 8, 8),
        ("two_hops", "winners, two hops", 8, 8),
    ],
)
def test_calculated_bytes_equal_counted_bytes(exchange, name, ranks, node):
    from flash_dmattn.distributed import context_parallel_dmattn

    n, window, heads, dim = 64, 32, 16, 32
    model = exchange_table.Model(heads=heads, heads_kv=heads, head_dim=dim, window=window)

    def counted(wire):
        q, k, v = (torch.randn(1, n, heads, dim).bfloat16().requires_grad_() for _ in range(3))
        scores = torch.randn(1, heads, n).requires_grad_()
        out = context_parallel_dmattn(
            q, k, v, scores, group=wire, keep_window_size=window, exchange=exchange
        )
        forward = wire.traffic
        out.float().sum().backward()
        both = wire.traffic
        return (forward.sent, forward.received), (
            both.sent - forward.sent,
            both.received - forward.received,
        )

    bytes_of_ranks = run_in_threads(ranks, counted)
    busiest = [max(max(rank_bytes[way]) for rank_bytes in bytes_of_ranks) for way in (0, 1)]
    on_paper = [
        sum(hop.bytes() for hop in hops) for hops in model.exchanges(n * ranks, ranks, node)[name]
    ]
    assert busiest == pytest.approx(on_paper, rel=0.02)


def test_document_has_the_numbers_of_the_table(capsys):
    assert bench.main(["exchange"]) == 0
    times = {}
    for block in capsys.readouterr().out.strip().split("\n\n"):
        ranks, *rows = block.splitlines()
        for name, _, million_cell, _ in (
            row.strip("| ").split(" | ") for row in rows if "; " in row
        ):
            times[ranks.split()[0], name] = million_cell.partition("; ")[2]
    document = (ROOT / "docs/kernels/context-parallel.md").read_text()
    section = document.partition("## Computed time")[2].partition("\n## ")[0]
    written = {}
    for line in section.splitlines():
        name, *cells = map(str.strip, line.strip("|").split("|"))
        if len(cells) == 6 and cells[-1].endswith(" %"):
            for ranks, (forward, backward, share) in (("8", cells[:3]), ("64", cells[3:])):
                if share:
                    cell = f"{forward} / {backward}; {share}"
                    written[ranks, NAMES.get(name, name)] = cell.replace(",", "")
    assert len(written) == 6
    assert written == {key: times[key] for key in written}
