"""Attention over a sequence split over processes with gloo has the rows, gradients and keys of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import pieces_over_ranks
from flash_dmattn.distributed import (
    ContextParallel,
    begin_exchange,
    context_parallel_dmattn,
    exchanged_bytes,
)
from processes import run_in_processes
from sharded_cases import cases, compare_with_one_process, in_one_process, normal, whole_and_piece


def compare_cases(rank, count):
    failed = []
    for seed, (name, case) in enumerate(list(cases(count).items())[::3]):
        whole = in_one_process(case, seed)
        for exchange in ("direct", "two_hops"):
            try:
                compare_with_one_process(whole, dist.group.WORLD, rank, exchange)
            except AssertionError as error:
                failed.append(f"{name}, {exchange}: {error}")
                print(failed[-1], flush=True)  # gloo aborts a rank whose collectives differ
    assert not failed, "\n".join(failed)


def test_pieces_equal_one_process():  # test_many_ranks.py tests all cases, with threads
    run_in_processes(2, compare_cases, 2)


def pass_checks(rank, names):
    for name in names:
        pieces_over_ranks.run_check(name, "cpu")


@pytest.mark.parametrize("count", [2, 4])
def test_checks_of_several_gpus_pass_over_gloo(count):
    run_in_processes(count, pass_checks, list(pieces_over_ranks.CHECKS))


# ---- Helpers around the call ---------------------------------------------------------------------


def surroundings(rank, count):
    for check in (
        device_mesh_is_a_group,
        a_batch_is_cut_and_gathered,
        bytes_are_those_of_the_formula,
        checkpoints_exchange_again_unless_it_is_saved,
        autocast_exchanges_sixteen_bits,
        moved_gradients_saturate_or_propagate,
    ):
        try:
            check(rank, count)
        except Exception as error:
            raise AssertionError(f"{check.__name__} on rank {rank} of {count}") from error


@pytest.mark.parametrize("count", [2, 4])
def test_shard_gather_roll_and_mean_equal_one_process(count):
    run_in_processes(count, surroundings, count)


def device_mesh_is_a_group(rank, count):
    q, k, v, _, s, rows = whole_and_piece(rank, count)
    mesh = init_device_mesh("cpu", (1, count), mesh_dim_names=("dp", "cp"))
    call = [t[:, rows] for t in (q, k, v)] + [s[..., rows]]
    out = [
        context_parallel_dmattn(*call, group=group, keep_window_size=17)
        for group in (mesh["cp"], dist.group.WORLD)
    ]
    assert torch.equal(*out)
    with pytest.raises(ValueError, match="DeviceMesh of 2 dimensions"):
        context_parallel_dmattn(*call, group=mesh, keep_window_size=17)


def a_batch_is_cut_and_gathered(rank, count):
    cp = ContextParallel(dist.group.WORLD)
    N = 16 * count - 3
    tokens = torch.arange(2 * N).view(2, N)
    piece = cp.shard(tokens, tokens, multiple=4)
    assert piece.input_ids.shape == (2, 16) and piece.cu_seqlens is None and piece.key_mask is None
    assert torch.equal(cp.gather(piece.input_ids, N), tokens)
    labels = cp.gather(piece.shift_labels, N)
    assert torch.equal(labels[:, :-1], tokens[:, 1:]) and (labels[:, -1] == -100).all()
    assert torch.equal(cp.gather(piece.position_ids)[0], torch.arange(16 * count))
    # At a new document positions begin again, and its first token is no label.
    positions = torch.cat([torch.arange(21), torch.arange(N - 21)])[None]
    packed = cp.shard(tokens[:1], tokens[:1], position_ids=positions)
    assert packed.cu_seqlens.tolist() == [[0, 21, N]]
    again = cp.shard(tokens[:1], tokens[:1], cu_seqlens=torch.tensor([0, 21, N]))
    assert torch.equal(cp.gather(again.position_ids, N), positions)
    for piece in (packed, again):
        labels = cp.gather(piece.shift_labels, N)[0]
        assert (labels == -100).nonzero()[:, 0].tolist() == [20, N - 1]
    mask = torch.ones(2, N, dtype=torch.long)
    mask[0, :5] = 0
    masked = cp.shard(tokens, attention_mask=mask)
    assert torch.equal(cp.gather(masked.key_mask, N), mask.bool())
    # The mean is over the labels of all ranks. Its gradient is right once it is averaged over the ranks.
    values = normal(2, 16 * count, seed=5)
    own_values = values[:, rank * 16 : rank * 16 + 16].clone().requires_grad_()
    valid = 3 * rank  # rank 0 has no label
    loss = cp.mean(own_values[:, :valid].sum(), 2 * valid)
    total = sum(values[:, r * 16 : r * 16 + 3 * r].sum() for r in range(count))
    labels = sum(6 * r for r in range(count))
    torch.testing.assert_close(loss, total / labels)
    (gradient,) = torch.autograd.grad(loss, own_values)
    assert torch.equal(gradient[:, valid:], torch.zeros(2, 16 - valid))
    torch.testing.assert_close(gradient[:, :valid] / count, torch.full((2, valid), 1 / labels))
    # Weights may add up to less than 1, or there may be no labels at all.
    for weight, divisor in ((2**-4, count * 2**-4), (0, 1)):
        loss = cp.mean(own_values.sum(), weight)
        torch.testing.assert_close(loss, values.sum() / divisor)
        (gradient,) = torch.autograd.grad(loss, own_values)
        assert torch.equal(gradient, torch.full((2, 16), count / divisor))
    # Rolled tokens move over boundaries.
    whole = normal(2, 16 * count, 3, seed=6).requires_grad_()
    weight = normal(2, 16 * count, 3, seed=7)
    rows = slice(rank * 16, rank * 16 + 16)
    for shifts in (1, -1, 5, -16, 0):
        expected = torch.roll(whole, shifts, 1)
        (wanted,) = torch.autograd.grad(expected, whole, weight)
        local = whole.detach()[:, rows].requires_grad_()
        rolled = cp.roll(local, shifts)
        assert torch.equal(rolled, expected[:, rows])
        if shifts:
            (gradient,) = torch.autograd.grad(rolled, local, weight[:, rows])
            assert torch.equal(gradient, wanted[:, rows])
    # A second derivative also moves tokens back.
    first, second = (
        torch.autograd.grad(roll(leaf).pow(3).sum(), leaf, create_graph=True)[0]
        for roll, leaf in ((lambda t: torch.roll(t, 5, 1), whole), (lambda t: cp.roll(t, 5), local))
    )
    (wanted,) = torch.autograd.grad((first * torch.roll(whole, -3, 1)).sum(), whole)
    (gradient,) = torch.autograd.grad((second * cp.roll(local, -3)).sum(), local)
    torch.testing.assert_close(gradient, wanted[:, rows])


def bytes_are_those_of_the_formula(rank, count):
    q, k, v, do, s, rows = whole_and_piece(rank, count, batch=1)
    row, note, w, heads = 2 * 16 * 2, 8, 17, 2
    for exchange in ("direct", "two_hops"):
        piece = [t[:, rows].bfloat16().requires_grad_() for t in (q, k, v)]
        scores = s[..., rows].clone().requires_grad_()
        before = exchanged_bytes(dist.group.WORLD)
        out = context_parallel_dmattn(
            *piece,
            scores,
            group=dist.group.WORLD,
            keep_window_size=w,
            exchange=exchange,
            check=False,
        )
        middle = exchanged_bytes(dist.group.WORLD)
        torch.autograd.grad(out, [*piece, scores], do[:, rows].bfloat16())
        after = exchanged_bytes(dist.group.WORLD)
        state = w * heads * row
        if exchange == "direct":
            expected = (
                rank * (state + w * heads * note),
                (count - 1 - rank) * (state + w * heads * 4),
            )
            calls = 1
        else:
            copies = max(1, count // heads)  # copies of the metadata, if blocks of columns are sent
            share = 2 * (count - 1) / count
            expected = (
                share * (state + copies * w * heads * note),
                share * (1.5 * state + copies * w * heads * 4),  # sums return in float32
            )
            calls = 2
        for traffic, wanted in zip((middle, after), expected, strict=True):
            part = traffic.received - (before if traffic is middle else middle).received
            assert wanted <= part <= wanted + 4 * count * 16, (exchange, part, wanted)
        assert middle.collectives - before.collectives == calls
        assert after.collectives - middle.collectives == calls


def autocast_exchanges_sixteen_bits(rank, count):
    _, k, v, _, s, rows = whole_and_piece(rank, count)
    with torch.autocast("cpu", torch.bfloat16):
        exchanged = begin_exchange(
            k[:, rows], v[:, rows], s[..., rows], group=dist.group.WORLD, keep_window_size=17
        )
    assert exchanged.key.dtype == exchanged.value.dtype == torch.bfloat16
    assert exchanged.scores.dtype == torch.float32


def checkpoints_exchange_again_unless_it_is_saved(rank, count):
    group = dist.group.WORLD
    q, k, v, do, s, rows = whole_and_piece(rank, count)

    def layer(q, k, v, s):
        return context_parallel_dmattn(q.sin(), k, v, s, group=group, keep_window_size=17)

    operators = [torch.ops.flash_dmattn.exchange_keys.default]
    saves = partial(create_selective_checkpoint_contexts, operators)
    results, calls = [], []
    runs = (
        layer,
        partial(checkpoint, layer, use_reentrant=False),
        partial(checkpoint, layer, use_reentrant=False, context_fn=saves),
    )
    for run in runs:
        leaves = [t[:, rows].clone().requires_grad_() for t in (q, k, v)]
        leaves.append(s[..., rows].clone().requires_grad_())
        before = exchanged_bytes(group).collectives
        out = run(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, do[:, rows])])
        calls.append(exchanged_bytes(group).collectives - before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    hops = 1 if count == 2 else 2
    assert calls == [2 * hops, 3 * hops, 2 * hops]  # forward, again, backward


def moved_gradients_saturate_or_propagate(rank, count):
    k = torch.ones(1, 8, 1, 16, dtype=torch.float16)
    results = []
    for nonfinite in ("saturate", "propagate"):
        leaves = [t.clone().requires_grad_() for t in (k, k, k)]
        out = context_parallel_dmattn(
            *leaves, torch.zeros(1, 1, 8), group=dist.group.WORLD, keep_window_size=8 * count,
            nonfinite=nonfinite,
        )  # fmt: skip
        dout = torch.full_like(out, 6e4)  # overflows a value's 16-bit gradient
        results.append(torch.autograd.grad(out, leaves, dout)[2])
    saturated, propagated = results
    assert saturated.isfinite().all()
    if rank == 0:
        assert propagated.isinf().any()
