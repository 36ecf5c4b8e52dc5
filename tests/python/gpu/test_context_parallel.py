"""Pieces of a sequence on one GPU, with ranks as threads, have the keys and bits of the whole.

Backward needs a process per rank, because all threads share autograd's thread of a device. test_context_parallel_over_nccl.py
compares it on several GPUs.
"""

import pytest
import torch

from flash_dmattn import flash_dmattn_func, select_key_intervals, select_keys
from flash_dmattn.distributed import (
    ContextParallel,
    attend_to_pieces,
    begin_exchange,
    boundary_places,
    boundary_state,
)
from ranks_as_threads import run_in_threads
from sharded_cases import keys_seen

RULES = {
    "window": {"keep_window_size": 300},
    "heads": {"keep_window_size": (300, 70), "recent_window": 40, "recent_competes": True},
    "delayed": {"keep_window_size": 200, "recent_window": 90, "sink_tokens": 3},
    "threshold": {"keep_window_size": 200, "score_threshold": 0.5, "recent_window": 20},
}  # fmt: skip


def states(length, scores="normal"):
    q, k, v = (
        torch.randn(1, length, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2)
    )
    s = torch.randn(1, 2, length, device="cuda")
    return q, k, v, (s * 2).round() / 2 if scores == "ties" else s


def piece_of(collectives, n):
    return slice(collectives.rank * n, collectives.rank * n + n)


def exchange(collectives, rows, k, v, s, **options):
    return begin_exchange(k[:, rows], v[:, rows], s[..., rows], group=collectives, **options)


@pytest.mark.parametrize("window", [1, 100, 128, 1000, 5000])
def test_select_keys_equals_the_cpu(window):
    scores = (torch.randn(2, 3, 1000) * 8).round()
    scores[0, 0, ::2] = torch.nan
    mask = torch.rand(2, 1000) < 0.7
    for key_mask in (None, mask):
        on_gpu = select_keys(scores.cuda(), window, None if key_mask is None else key_mask.cuda())
        for actual, wanted in zip(on_gpu, select_keys(scores, window, key_mask), strict=True):
            assert torch.equal(actual.cpu(), wanted)


@pytest.mark.parametrize("way", ["direct", "two_hops"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scores", ["normal", "ties"])
def test_pieces_see_the_keys_of_the_whole(rule, ranks, way, scores):
    n, rule = 512, RULES[rule]
    q, k, v, s = states(n * ranks, scores)
    chosen = select_key_intervals(s, **rule)
    seen = chosen.to_mask()
    whole = flash_dmattn_func(q, k, v, attn_bias=s, key_intervals=chosen)

    def piece(collectives):
        rows = piece_of(collectives, n)
        exchanged = exchange(collectives, rows, k, v, s, exchange=way, **rule)
        named = exchanged._asdict().items()
        on_cpu = {name: t.cpu() for name, t in named if isinstance(t, torch.Tensor)}
        assert torch.equal(keys_seen(exchanged._replace(**on_cpu)), seen[:, :, rows].cpu())
        return attend_to_pieces(q[:, rows], exchanged)

    out = torch.cat(run_in_threads(ranks, piece), 1)
    torch.testing.assert_close(out, whole, rtol=2**-7, atol=2**-7)


def test_documents_and_padding_see_the_keys_of_the_whole():
    n, ranks = 512, 4
    q, k, v, s = states(n * ranks)
    offsets = torch.tensor([0, 300, 1024, 1500, 2000], device="cuda")
    mask = torch.rand(1, n * ranks, device="cuda") < 0.9
    chosen = select_key_intervals(s, 200, cu_seqlens_k=offsets, key_mask=mask)
    whole = flash_dmattn_func(q, k, v, attn_bias=s, key_intervals=chosen)

    def piece(collectives):
        rows = piece_of(collectives, n)
        options = {"keep_window_size": 200, "cu_seqlens": offsets, "key_mask": mask[:, rows]}
        exchanged = exchange(collectives, rows, k, v, s, **options)
        return attend_to_pieces(q[:, rows], exchanged)

    out = torch.cat(run_in_threads(ranks, piece), 1)
    torch.testing.assert_close(out, whole, rtol=2**-7, atol=2**-7)


def test_headroom_is_filled_in_place():
    n, ranks, w = 512, 2, 300
    q, k, v, s = states(n * ranks)
    whole = flash_dmattn_func(q, k, v, None, s, is_causal=True, keep_window_size=w)

    def piece(collectives):
        rows = piece_of(collectives, n)
        places = boundary_places(collectives, n, w)
        keys = [
            torch.cat([torch.full_like(t[:, :places], torch.nan), t[:, rows]], 1) for t in (k, v)
        ]
        exchanged = begin_exchange(
            *keys, s[..., rows], group=collectives, keep_window_size=w, headroom=True
        )
        assert exchanged.key.data_ptr() == keys[0].data_ptr()
        cache = boundary_state(exchanged)
        return attend_to_pieces(q[:, rows], exchanged), cache

    piece_results = run_in_threads(ranks, piece)
    torch.testing.assert_close(
        torch.cat([out for out, _ in piece_results], 1), whole, rtol=2**-7, atol=2**-7
    )
    kept, counts = select_keys(s, w)
    positions = piece_results[-1][1].positions.sort(-1).values
    assert torch.equal(positions, kept) and (counts == w).all()


@pytest.mark.parametrize("rule", RULES)
def test_tokens_after_a_boundary_see_the_keys_of_the_whole(rule):
    n, ranks, steps, rule = 512, 2, 40, RULES[rule]
    q, k, v, s = states(n * ranks + steps)
    whole = flash_dmattn_func(q, k, v, attn_bias=s, key_intervals=select_key_intervals(s, **rule))

    def state(collectives):
        return boundary_state(exchange(collectives, piece_of(collectives, n), k, v, s, **rule))

    for boundary, cache in enumerate(run_in_threads(ranks, state), 1):
        for i in range(boundary * n, boundary * n + steps):
            token = slice(i, i + 1)
            score = s[..., token].contiguous()
            out = cache.step(q[:, token], k[:, token], v[:, token], score)
            torch.testing.assert_close(out, whole[:, token], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("rule", RULES)
def test_exchange_on_another_stream_has_the_same_bits(rule):
    n, ranks, rule = 512, 2, RULES[rule]
    q, k, v, s = states(n * ranks)

    def piece(collectives):
        rows = piece_of(collectives, n)
        outs = []
        for stream in (None, torch.cuda.Stream()):
            for _ in range(5):
                # The tensors are made on the current stream just before, and their memory is reused just after.
                keys = [t[:, rows].clone() for t in (k, v)]
                scores = s[..., rows].clone()
                exchanged = begin_exchange(
                    *keys, scores, group=collectives, stream=stream, check=False, **rule
                )
                del keys, scores
                junk = [torch.full_like(k[:, rows], torch.nan) for _ in range(4)]
                outs.append(attend_to_pieces(q[:, rows], exchanged))
                del exchanged, junk
        return all(torch.equal(out, outs[0]) for out in outs)

    assert run_in_threads(ranks, piece) == [True] * ranks


def test_wrong_offsets_on_a_gpu_raise_while_ranks_compare():
    """The values of offsets are read only while ranks compare, not in later calls."""
    q, k, v, s = states(64)
    offsets = torch.tensor([2, 64], device="cuda")
    ids = torch.zeros(1, 64, dtype=torch.int64, device="cuda")
    options = {"keep_window_size": 8, "lengths": (64, 64), "cu_seqlens": offsets}
    for wrong in (
        lambda collectives: ContextParallel(collectives).shard(ids, cu_seqlens=offsets),
        lambda collectives: begin_exchange(k, v, s, group=collectives, **options),
    ):
        with pytest.raises(ValueError, match=r"^cu_seqlens: got \[2, 64\], expected offsets"):
            run_in_threads(2, wrong)
