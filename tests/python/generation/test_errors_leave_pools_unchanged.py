"""A meaningless argument of a ragged step raises an error that names it before any row of the pool changes."""

import pytest
import torch

from flash_dmattn import DynamicMaskAttention, KVSlots, RaggedBatch, extend_ragged
from small_caches import BAD_OPTIONS, CHUNK, HKV, HQ, WINDOW, D, tokens, unchanged

# A step changes the pool in three parts, one after the other: a token of row 2, a prompt for row 0, and a later chunk of row 1.
OFFSETS, BEGINS, TOKENS = [0, 1, 5, 7], [False, True, False], 7


def pool_of_rows(**options):
    pool = KVSlots(4, HKV, WINDOW, D, **options)
    pool.fill(**tokens(6, batch=4))
    return pool


def batch_of(*rows, offsets=OFFSETS, begins=BEGINS):
    return RaggedBatch(offsets, torch.tensor(rows, dtype=torch.int32), begins)


def ragged_step(**spoiled):
    """Returns the arguments of a correct call without the pool, with those in `spoiled` replaced."""
    query, key, value = (torch.randn(TOKENS, h, D) for h in (HQ, HKV, HKV))
    scores = torch.randn(HKV, TOKENS)
    states = {"query": query, "key": key, "value": value, "scores": scores}
    return {"batch": batch_of(2, 0, 1)} | states | spoiled


def decoding_rows(*rows):
    """Returns a wrong batch in which each sequence decodes one token, and the states of these tokens."""
    batch = RaggedBatch.of_rows(torch.tensor(rows, dtype=torch.int32))
    states = {
        name: torch.randn(len(rows), h, D)
        for name, h in (("query", HQ), ("key", HKV), ("value", HKV))
    }
    return {"batch": batch, **states, "scores": torch.randn(HKV, len(rows))}  # fmt: skip


META = torch.device("meta")


@pytest.mark.parametrize(
    "message, spoiled",
    [
        ("rows[0]: got 9, expected below 4, the rows of pool, or negative", {"batch": batch_of(9, 0, 1)}),
        ("rows[1]: got 4, expected below 4", {"batch": batch_of(2, 4, 1)}),
        ("rows[2]: got 9, expected below 4", {"batch": batch_of(2, 0, 9)}),
        ("rows[1]: got 9, expected below 4", {"batch": batch_of(0, 9, offsets=[0, 2, 5], begins=None)}),
        ("rows[2]: got 4, expected below 4", decoding_rows(1, -1, 4)),
        ("rows[2]: got 1, which rows[0] is, expected no row twice", decoding_rows(1, -1, 1)),
        ("rows: got a tensor on meta, expected cpu, the device of pool",
         {"batch": RaggedBatch(OFFSETS, torch.zeros(3, dtype=torch.int32, device=META), BEGINS)}),
        ("batch: got list, expected RaggedBatch", {"batch": [0, 2]}),
        ("batch: got NoneType, expected RaggedBatch", {"batch": None}),
        ("key: got 7 tokens, expected 6, those of query", {"query": torch.randn(6, HQ, D)}),
        ("query: got 7 tokens, expected 9 or more", {"batch": batch_of(2, 0, 1, offsets=[2, 3, 7, 9])}),
        ("query: got NoneType, expected a torch.Tensor", {"query": None}),
        ("query: got list, expected a torch.Tensor", {"query": [1.0]}),
        ("query: got shape (7, 3, 8), expected [T, Hq, 8] with Hq a multiple of 2", {"query": torch.randn(7, 3, D)}),
        ("query: got shape (7, 4, 7), expected [T, Hq, 8]", {"query": torch.randn(7, HQ, D - 1)}),
        ("query: got shape (1, 7, 4, 8), expected [T, Hq, 8]", {"query": torch.randn(1, 7, HQ, D)}),
        ("query: got torch.float64 on cpu, expected torch.float32 on cpu, those of pool", {"query": torch.randn(7, HQ, D).double()}),
        ("query: got torch.float32 on meta, expected torch.float32 on cpu", {"query": torch.randn(7, HQ, D, device=META)}),
        ("key: got 3 tokens, expected 7, those of query", {"key": torch.randn(3, HKV, D)}),
        ("key: got 8 tokens, expected 7, those of query", {"key": torch.randn(8, HKV, D)}),
        ("key: got shape (7, 1, 8), expected (7, 2, 8)", {"key": torch.randn(7, 1, D)}),
        ("key: got NoneType, expected a torch.Tensor", {"key": None}),
        ("key: got torch.bfloat16 on cpu", {"key": torch.randn(7, HKV, D).bfloat16()}),
        ("value: got 6 tokens, expected 7, those of query", {"value": torch.randn(6, HKV, D)}),
        ("value: got shape (7, 2, 9), expected (7, 2, 8)", {"value": torch.randn(7, HKV, D + 1)}),
        ("value: got list, expected a torch.Tensor", {"value": [1.0]}),
        ("value: got torch.float32 on meta", {"value": torch.randn(7, HKV, D, device=META)}),
        ("scores: got shape (2, 6), expected (2, 7)", {"scores": torch.randn(HKV, 6)}),
        ("scores: got shape (7, 2), expected (2, 7)", {"scores": torch.randn(7, HKV)}),
        ("scores: got shape (7,), expected (2, 7)", {"scores": torch.randn(7)}),
        ("scores: got NoneType, expected a torch.Tensor", {"scores": None}),
        ("scores: got torch.bfloat16 on cpu, expected torch.float32 on cpu", {"scores": torch.randn(HKV, 7).bfloat16()}),
        ("scores: got torch.float32 on meta", {"scores": torch.randn(HKV, 7, device=META)}),
        *(case for case in BAD_OPTIONS if "nonfinite" not in case[1]),
        ("scal", {"scal": 1.0}),
    ],
)  # fmt: skip
def test_bad_ragged_step_leaves_pool_unchanged(message, spoiled):
    pool = pool_of_rows()
    with unchanged(pool, message):
        extend_ragged(pool, **ragged_step(**spoiled))


def test_ragged_step_on_another_pool_leaves_it_unchanged():
    pool = pool_of_rows(chunk=CHUNK)
    view = pool.over(torch.tensor([0, 1], dtype=torch.int32))
    with unchanged(pool, "pool: got a view of some rows, expected a cache of its own"):
        extend_ragged(view, **ragged_step())
    pool.append(**tokens(2, batch=4))
    with unchanged(pool, "pool: got 2 pending tokens, expected a cache of its own without"):
        extend_ragged(pool, **ragged_step())
    for other, name in (
        (None, "NoneType"),
        (pool.tensors, "tuple"),
        (DynamicMaskAttention, "type"),
    ):
        with pytest.raises(TypeError, match=f"pool: got {name}, expected KVSlots"):
            extend_ragged(other, **ragged_step())


@pytest.mark.parametrize("row", [1, 2])
@pytest.mark.parametrize("rows", [(2, 0, 1), (1, 0, 2)], ids=str)
def test_ragged_step_on_memory_that_was_never_cleared_leaves_pool_unchanged(rows, row):
    pool = pool_of_rows()
    pool.counts[row, 0, 0] = WINDOW + 1
    with unchanged(pool, ".count: got 5, expected 0 to 4"):
        extend_ragged(pool, **ragged_step(batch=batch_of(*rows)))


def test_ragged_step_on_unknown_backend_leaves_pool_unchanged():
    pool = pool_of_rows()
    pool.backend = "abacus"
    with unchanged(pool, "abacus"):
        extend_ragged(pool, **ragged_step())


def test_ragged_step_with_a_tangent_leaves_pool_unchanged():
    pool, step = pool_of_rows(), ragged_step()
    with unchanged(pool, "value: got a tensor with a tangent"):
        torch.func.jvp(
            lambda value: extend_ragged(pool, **(step | {"value": value})),
            (step["value"],),
            (step["value"],),
        )


def test_rows_on_another_device_are_not_read():
    """Reading them would wait for a GPU; on the meta device it raises."""
    rows = torch.full((3,), 9, dtype=torch.int32, device=META)
    pool = KVSlots(4, HKV, WINDOW, D, device=META)
    for batch in (RaggedBatch(OFFSETS, rows, BEGINS), RaggedBatch.of_rows(rows)):
        batch._check_rows(pool)
