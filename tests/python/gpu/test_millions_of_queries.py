"""Rows of more than 2^15 tiles follow a schedule as short ones do, and match the oracle at rows from all over the sequence."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func, sliding_window
from flash_dmattn.check.oracle import Problem, Result
from flash_dmattn.kernels import recorded_kernels
from problem_calls import assert_matches_oracle

WINDOW = 256
TILES = 2**15  # of 64 queries in a backward, and of 128 in a forward

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 20 * 2**30,
    reason="needs 20 GiB of GPU memory",
)


def attend(leaves, dout, options):
    q, k, v, bias = leaves
    out, lse = flash_dmattn_func(
        q, k, v, attn_bias=bias, is_causal=True, return_lse=True, **options
    )
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def inputs(length):
    q, k, v, dout = torch.randn(4, 1, length, 1, 64, dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(1, 1, length, device="cuda")
    return [t.requires_grad_() for t in (q, k, v, bias)], dout


def sampled_rows(length):
    random = torch.Generator().manual_seed(length)
    begins = [0, 64 * TILES - 72, 128 * TILES - 136, length - 16]
    begins += torch.randint(length - 16, (24,), generator=random).tolist()
    rows = [torch.arange(begin, begin + 16) for begin in begins if begin + 16 <= length]
    return torch.cat(rows).unique().cuda()


def keys_of_row(row, scores, way):
    if way == "window":
        return torch.arange(max(row + 1 - WINDOW, 0), row + 1, device="cuda")
    newest_first = scores[: row + 1].flip(0)  # among equal scores the more recent key wins
    return row - newest_first.sort(descending=True, stable=True).indices[:WINDOW]


@pytest.mark.parametrize(
    "way, length",
    [("selection", 64 * TILES + 64), ("selection", 128 * TILES + 128), ("window", 128 * TILES)],
)
def test_millions_of_queries_match_oracle_at_sampled_rows(way, length):
    def options(length):
        if way == "selection":
            return {"keep_window_size": WINDOW}
        return {"key_intervals": sliding_window(length, WINDOW, device="cuda")}

    with recorded_kernels() as kernels_of_short_rows:
        attend(*inputs(2**16), options(2**16))

    leaves, dout = inputs(length)
    rows = sampled_rows(length)
    dout.copy_(torch.zeros_like(dout).index_copy_(1, rows, dout[:, rows]))
    with recorded_kernels() as kernels:
        out, lse, dq, dk, dv, dbias = attend(leaves, dout, options(length))
    assert list(kernels) == list(kernels_of_short_rows)

    q, k, v, bias = (t.detach() for t in leaves)
    keys_of_rows = [keys_of_row(row, bias[0, 0], way) for row in rows.tolist()]
    keys = torch.cat(keys_of_rows).unique()
    shown = torch.zeros(1, 1, len(rows), len(keys), dtype=torch.bool, device="cuda")
    for shown_row, keys_of_one in zip(shown[0, 0], keys_of_rows, strict=True):
        shown_row[torch.searchsorted(keys, keys_of_one)] = True
    problem = Problem(
        q[:, rows], k[:, keys], v[:, keys], dout[:, rows], bias=bias[:, :, None, keys], shown=shown
    )
    actual = Result(
        out[:, rows], lse[..., rows], dq[:, rows], dk[:, keys], dv[:, keys], dbias[:, :, None, keys]
    )
    assert_matches_oracle(actual, problem)
    # The other rows have no gradient of their output, and the other keys are visible to those rows alone.
    assert not dq.index_fill_(1, rows, 0).any()
    for gradient in (dk, dv, dbias.mT):
        assert not gradient.index_fill_(1, keys, 0).any()
