"""Decoding after a piece needs only its boundary state and equals one process, under every rule."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings

from flash_dmattn import KVSlots
from flash_dmattn.distributed import attend_to_pieces, begin_exchange, boundary_state
from processes import run_in_processes
from random_cases import random_cases
from ranks_as_threads import run_in_threads
from sharded_cases import attention_in_one_process, cases, tensors

STEPS = 9


def compare_decoding(case, group, rank, ranks, seed):
    """Compares decoding with one process. The lengths of a case are those of the ranks' pieces, then of tokens
    that no rank has."""
    q, k, v, s, _, _, mask, offsets = tensors(case, seed)
    expected, lse = attention_in_one_process(case, q, k, v, s, None, mask, offsets, None)
    start, total = sum(case.lengths[:rank]), sum(case.lengths[:ranks])
    end = start + case.lengths[rank]
    rows = slice(start, end)
    exchanged = begin_exchange(
        k[:, rows], v[:, rows], s[..., rows], group=group, keep_window_size=case.window, **case.rule,
        attn_bias="scores" if case.bias == "scores" else None,
        key_mask=None if mask is None else mask[:, rows],
        cu_seqlens=None if offsets is None else offsets.clamp(max=total),
        lengths=case.lengths[:ranks],
    )  # fmt: skip
    out = attend_to_pieces(q[:, rows], exchanged, **case.call)
    torch.testing.assert_close(out, expected[:, rows], rtol=2e-5, atol=5e-6)
    cache = boundary_state(exchanged)
    begun = torch.zeros(case.batch, dtype=torch.int64)
    stop = torch.full((case.batch,), sum(case.lengths))
    if offsets is not None:
        at = torch.searchsorted(offsets, torch.full((len(offsets), 1), end), right=True)
        ends = torch.nn.functional.pad(offsets, (0, 1), value=end)
        stop = ends.gather(1, at)[:, 0].expand(case.batch)
        begun = offsets.gather(1, at - 1)[:, 0].expand(case.batch)
        if end == total:  # the last document that the ranks know ends here
            begun = stop = torch.full((case.batch,), end)
        begun = torch.where(stop > end, begun, end)
    assert torch.equal(cache.seen.long(), end - begun)
    assert not cache.counts[begun == end, :, 0].any()
    for i in range(end, min(end + STEPS, int(stop.max()))):
        token = slice(i, i + 1)
        out, step_lse = cache.step(
            q[:, token], k[:, token], v[:, token], s[..., token].expand(-1, k.shape[2], -1).contiguous(),
            key_mask=None if mask is None else mask[:, token],
            scores_are_bias=case.bias == "scores", return_lse=True, **case.call,
        )  # fmt: skip
        goes_on = i < stop
        for actual, wanted in ((out, expected[:, token]), (step_lse, lse[..., token])):
            torch.testing.assert_close(actual[goes_on], wanted[goes_on], rtol=2e-5, atol=5e-6)


def decodable_cases(ranks):
    """Returns the cases with one score per key and a cache that holds keys, with tokens after the sequence."""
    for name, case in cases(ranks).items():
        if name == "window of 0":
            continue
        plain = case.bias in ("scores", "none") and case.d == case.dv
        if plain and case.scores != "odd" and not case.call.keys() - {"softcap", "scale"}:
            case.lengths = [*case.lengths, STEPS]
            yield name, case


def decode_all(rank, count):
    failed = []
    for seed, (name, case) in enumerate(decodable_cases(count)):
        try:
            compare_decoding(case, dist.group.WORLD, rank, count, seed)
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    assert not failed, "\n".join(failed)


def test_decoding_after_pieces_equals_one_process():
    run_in_processes(2, decode_all, 2)


@settings(
    max_examples=35, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(case=random_cases(biases=("scores", "none")))
def test_decoding_after_random_pieces_equals_one_process(case):
    assume(case.selection().place_count() > 0)  # a cache needs at least one place
    ranks = len(case.lengths) - 1
    run_in_threads(
        ranks, lambda collectives: compare_decoding(case, collectives, collectives.rank, ranks, 5)
    )


TOKENS, RECENT = 12, 4


def filled_cache(**rule):
    """Returns a cache after 12 tokens. It holds the last four as recent keys, and others."""
    torch.manual_seed(0)
    cache = KVSlots(1, 2, 4, 16, recent_window=RECENT, **rule)
    key = torch.randn(1, TOKENS, 2, 16)
    cache.fill(key, key, torch.randn(1, 2, TOKENS))
    return cache


def later_positions(by):
    return (torch.arange(TOKENS, dtype=torch.int32) + by).expand(1, 2, -1).clone()


@pytest.mark.parametrize("rule", [{}, {"recent_competes": True}, {"sink_tokens": 2}], ids=str)
def test_keys_leave_the_same_after_shifted_positions(rule):
    caches = [filled_cache(**rule), filled_cache(**rule)]
    positions = later_positions(30)
    positions[..., :-RECENT] -= 20  # older keys are further away
    caches[1].renumber(positions, torch.tensor([TOKENS + 30]))
    assert caches[1].seen.tolist() == [TOKENS + 30]
    for _ in range(20):
        key, scores = torch.randn(1, 1, 2, 16), torch.randn(1, 2, 1)
        first, second = (cache.step(key, key, key, scores) for cache in caches)
        torch.testing.assert_close(first, second, rtol=0, atol=0)


WRONG = {
    "all at one position": lambda p: p.fill_(10),
    "recent ones after seen": lambda p: p[..., -RECENT:].add_(1),
    "recent ones too early": lambda p: p[..., -RECENT:].sub_(1),
    "one recent key twice": lambda p: p[..., -1].sub_(1),
    "older ones among the recent": lambda p: p[..., :-RECENT].add_(RECENT),
    "descending": lambda p: p[..., :-RECENT].copy_(p[..., :-RECENT].flip(-1)),
    "before the text": lambda p: p[..., :-RECENT].sub_(100),
}


@pytest.mark.parametrize("name", WRONG)
def test_impossible_positions_raise_and_change_nothing(name):
    cache = filled_cache()
    before = cache.positions.clone()
    positions = later_positions(30)
    WRONG[name](positions)
    with pytest.raises(ValueError, match="positions: got positions that these keys cannot have"):
        cache.renumber(positions, torch.tensor([TOKENS + 30]))
    assert torch.equal(cache.positions, before)


@pytest.mark.parametrize("positions", [torch.zeros(1, 2, 8), torch.zeros(1, 8, dtype=torch.int32)])
def test_positions_of_another_shape_or_dtype_raise(positions):
    cache = KVSlots(1, 2, 4, 16)
    with pytest.raises(ValueError, match="positions: got torch"):
        cache.renumber(positions, torch.tensor([8]))
