"""Documents described by token positions equal documents described by offsets."""

import pytest
import torch

from flash_dmattn.distributed import ContextParallel, context_parallel_dmattn
from ranks_as_threads import run_in_threads

RANKS, N = 3, 20
BEGINS = {
    "one row for all": [[0, 7, 33, 52]],
    "each row its own": [[0, 7, 33, 52], [0, 20, 21, 40]],
    "one document of the second row": [[0, 7, 33, 52], [0, 0, 0, 0]],
    "at boundaries of pieces": [[0, 20, 40, 59]],
}


def rows_and_gradients(collectives, **documents):
    g = torch.Generator().manual_seed(3)
    shapes = [(2, RANKS * N, 4, 16), *2 * [(2, RANKS * N, 2, 16)]]
    whole = [torch.randn(shape, generator=g) for shape in shapes]
    scores = torch.randn(2, 2, RANKS * N, generator=g)
    rows = slice(collectives.rank * N, collectives.rank * N + N)
    leaves = [t[:, rows].clone().requires_grad_() for t in whole]
    leaves.append(scores[..., rows].clone().requires_grad_())
    out = context_parallel_dmattn(*leaves, group=collectives, keep_window_size=9, **documents)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("name", BEGINS)
def test_positions_and_offsets_give_the_same_results(name):
    offsets = torch.tensor([[*row, RANKS * N] for row in BEGINS[name]])
    index = torch.arange(RANKS * N)
    begins = [max(b for b in row if b <= i) for row in BEGINS[name] for i in index.tolist()]
    positions = index - torch.tensor(begins).view(len(offsets), -1)
    by_positions, by_offsets, whole = (
        run_in_threads(
            RANKS,
            lambda collectives, documents=documents: rows_and_gradients(collectives, **documents),
        )
        for documents in ({"position_ids": positions}, {"cu_seqlens": offsets}, {})
    )
    for actual, expected in zip(by_positions, by_offsets, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert not torch.equal(by_positions[-1][0], whole[-1][0])


def test_shard_with_a_list_of_offsets_equals_a_tensor():
    tokens = torch.arange(RANKS * N)[None]
    by_list, by_tensor = (
        run_in_threads(
            RANKS,
            lambda collectives, offsets=offsets: ContextParallel(collectives).shard(
                tokens, tokens, cu_seqlens=offsets
            ),
        )
        for offsets in ([0, 7, 33, 52], torch.tensor([0, 7, 33, 52]))
    )
    for actual, expected in zip(by_list, by_tensor, strict=True):
        for name in ("position_ids", "shift_labels", "cu_seqlens"):
            assert torch.equal(getattr(actual, name), getattr(expected, name))
