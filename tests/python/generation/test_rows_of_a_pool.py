"""A view of some rows of a pool works with the kernels of each backend and with the reference."""

import pytest
import torch

from flash_dmattn import DynamicMaskAttention, KVSlots
from gpu import where_there_is_a_gpu
from pool_rows import (
    CHECKS,
    DIM,
    GROUP,
    HEADS,
    ROWS,
    RULES,
    Place,
    check_drafts_of_rows,
    contents,
)
from small_caches import unchanged

CPU = Place()


@pytest.mark.parametrize(
    "place",
    [
        Place("cpu"),
        Place("cpu", dtype=torch.bfloat16, value_dim=5),
        Place("reference", value_dim=3),
        *where_there_is_a_gpu(
            (Place("cuda", "cuda", torch.bfloat16),), (Place("cuda", "cuda", torch.float16, 8),)
        ),
    ],
    ids=str,
)
# The last rule has enough slots for several blocks of a cluster to share.
@pytest.mark.parametrize(
    "rule", [*RULES, *where_there_is_a_gpu({"keep_window_size": 5000})], ids=str
)
@pytest.mark.parametrize("check", [*CHECKS, check_drafts_of_rows], ids=lambda check: check.__name__)
def test_rows_behave_like_separate_caches(place, rule, check):
    check(place, rule)


@pytest.mark.parametrize("rule", RULES, ids=["window", "rule", "large"])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("place", [CPU, Place("reference")], ids=["cpu", "reference"])
def test_view_follows_changed_rows(place, stride, rule):
    pool, _ = place.pool(rule)
    rows = place.rows(*range(2 * stride)).view(2, stride)[:, 0]
    view = pool.over(rows)
    states, prompt = place.tokens(2), place.tokens(2, 9)[1:]
    for chosen in ((4, 2), (-1, 5), (6, 3)):
        rows.copy_(place.rows(*chosen))
        expected = pool.select(place.rows(*(max(row, 0) for row in chosen)))
        out, wanted = view.step(*states), expected.step(*states)
        for b, row in enumerate(chosen):
            assert torch.equal(out[b], wanted[b] if row >= 0 else torch.zeros_like(out[b]))
        view.fill(*prompt)
        expected.fill(*prompt)
        assert contents(pool.select(place.rows(chosen[1]))) == contents(expected)[HEADS:]


def test_pool_with_a_view_is_not_empty():
    pool = KVSlots(3, 2, 5, 8)
    assert pool.is_empty
    view = pool.over(torch.tensor([1], dtype=torch.int32))
    k = torch.randn(1, 4, 2, 8)
    view.fill(k, k, torch.randn(1, 2, 4))
    assert not pool.is_empty
    assert not pool.select(torch.tensor([1])).is_empty


def test_pool_filled_by_a_view_after_clear_is_not_empty():
    pool = KVSlots(3, 2, 5, 8)
    view = pool.over(CPU.rows(1))
    pool.clear()
    k = torch.randn(1, 4, 2, 8)
    view.fill(k, k, torch.randn(1, 2, 4))
    assert not pool.is_empty


@pytest.mark.parametrize("rule", RULES, ids=["window", "rule", "large"])
@pytest.mark.parametrize(
    "restored",
    [
        lambda pool: pool.select(CPU.rows(0, 0)),
        lambda pool: pool.over(CPU.rows(6, 5)),
        lambda pool: pool.over(CPU.rows(1, 3)),
    ],
    ids=["another cache", "other rows of the pool", "the rows themselves"],
)
@pytest.mark.parametrize("rows", [(3, 1), (4,)], ids=str)
def test_restored_view_gives_its_own_rows(rows, restored, rule):
    pool, _ = CPU.pool(rule)
    expected = pool.select(CPU.rows(*(rows * 2)[:2]))
    cache = restored(pool)
    cache.restore(pool.over(CPU.rows(*rows)))
    assert contents(cache.snapshot()) == contents(expected)


def test_restoring_a_view_of_itself_permutes_rows():
    pool = CPU.pool(RULES[0])[0].snapshot()
    order = torch.randperm(ROWS).int()
    before = pool.snapshot()
    pool.over(order).restore(pool)
    assert contents(pool.select(order)) == contents(before)


def pool_with_a_view_and_pending_tokens():
    pool = CPU.pool(RULES[0])[0].select(CPU.rows(0, 1, 2, 3), chunk=3)
    view = pool.over(CPU.rows(3, 1))
    pool.append(*CPU.tokens(4, 2)[1:])
    return pool, view


@pytest.mark.parametrize(
    "call",
    [
        lambda view, _: view.step(*CPU.tokens(2)),
        lambda view, _: view.extend(*CPU.tokens(2)),
        lambda view, _: view.fill(*CPU.tokens(2, 9)[1:]),
        lambda view, other: view.restore(other),
    ],
    ids=["step", "extend", "fill", "restore"],
)
def test_view_made_before_append_raises_while_tokens_are_pending(call):
    pool, view = pool_with_a_view_and_pending_tokens()
    other = CPU.pool(RULES[0])[0].select(CPU.rows(4, 5))
    with unchanged(pool, "pending: got 2 tokens, expected none; commit them first"):
        call(view, other)
    pool.commit()
    call(view, other)


def test_snapshot_of_a_view_made_before_append_has_the_pending_tokens():
    pool, view = pool_with_a_view_and_pending_tokens()
    snapshot, expected = view.snapshot(), pool.select(CPU.rows(3, 1))
    for cache in (snapshot, expected):
        assert cache.pending == 2
        cache.commit()
    assert contents(snapshot) == contents(expected)


def test_layer_with_a_view_counts_the_tokens_of_its_rows():
    pool = CPU.pool(RULES[0])[0]
    seen = []

    def rope(query, key, positions):
        seen.append(positions.flatten().tolist())
        return query, key

    layer = DynamicMaskAttention(32, HEADS * GROUP, HEADS, 5, head_dim=DIM, rope=rope)
    with torch.no_grad():
        layer(torch.randn(3, 1, 32), cache=pool.over(CPU.rows(3, -7, 1)))
    assert [seen[0][0], seen[0][2]] == pool.seen[[3, 1]].sub(1).tolist()


REPEATED = r"^rows\[3\]: got 4, which rows\[0\] is, expected no row"
ROW_7 = r"rows.index\[1\]: got 7, expected a row before 7"


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (ROW_7, lambda pool, _: pool.over(CPU.rows(0, 7)).step(*CPU.tokens(2))),
        (REPEATED, lambda _, view: view.step(*CPU.tokens(4))),
        (REPEATED, lambda _, view: view.fill(*CPU.tokens(4, 9)[1:])),
        (REPEATED, lambda _, view: view.restore(CPU.pool(RULES[0])[0].select(CPU.rows(0, 1, 2, 3)))),
        *(("^rows: got", call) for call in (
            lambda _, view: view.append(*CPU.tokens(4, 2)[1:]),
            lambda _, view: view.commit(0),
            lambda _, view: view.drop(0),
            lambda _, view: view.pending_mask(),
            lambda _, view: view.select(CPU.rows(0)),
            lambda _, view: view.clear(),
            lambda _, view: view.over(CPU.rows(0)),
            lambda _, view: view.state_dict(),
            lambda pool, _: pool.over(torch.tensor([1])),
            lambda pool, _: pool.over(CPU.rows(1)[None]),
        )),
        ("dense rows", lambda pool, _: with_gaps(pool).append(*CPU.tokens(ROWS, 2)[1:])),
    ],
)  # fmt: skip
def test_bad_call_on_rows_raises_and_changes_nothing(words, call):
    pool, blocks = CPU.pool(RULES[0])
    view = pool.over(CPU.rows(4, -1, -1, 2))
    view.rows[3] = 4
    before = blocks.clone()
    with pytest.raises((ValueError, TypeError), match=words):
        call(pool, view)
    assert torch.equal(blocks, before)


def with_gaps(pool):
    wide = pool.select(torch.arange(ROWS, dtype=torch.int32), chunk=3)
    return KVSlots.from_tensors(5, *(torch.stack([t, t], 1)[:, 0] for t in wide.tensors))
