"""Tests a view of some rows of a pool on the GPU: against the CPU and rows alone, and in a graph that is replayed with other rows."""

import pytest
import torch

from flash_dmattn import KVSlots, RaggedBatch, extend_ragged
from gpu import capture
from pool_rows import HEADS, ROWS, RULES, Place, contents

places = pytest.mark.parametrize(
    "place",
    [Place("cuda", "cuda", torch.bfloat16), Place("cuda", "cuda", torch.float16, value_dim=8)],
    ids=["bf16", "f16"],
)
# The last place has enough slots for several blocks of a cluster to share.
rules = pytest.mark.parametrize("rule", [*RULES, {"keep_window_size": 5000}])


@places
@rules
def test_steps_over_rows_equal_cpu(place, rule):
    torch.manual_seed(0)
    pool, _ = place.pool(rule)
    on_cpu = Place(dtype=place.dtype, value_dim=place.value_dim).pool(rule)[0]
    for cpu_tensor, tensor in zip(on_cpu.tensors, pool.tensors, strict=True):
        cpu_tensor.copy_(tensor)
    for rows in ((4, -1, 6), (2, 5, 4, 3, 0, 1, 6), (-1,)):
        states = place.tokens(len(rows))
        expected = on_cpu.over(torch.tensor(rows, dtype=torch.int32)).step(
            *(t.cpu() for t in states)
        )
        out = pool.over(place.rows(*rows)).step(*states)
        torch.testing.assert_close(out.cpu(), expected, atol=2e-2, rtol=2e-2)
        assert contents(pool.select(place.rows(*range(ROWS)))) == contents(on_cpu)


@places
@rules
def test_graph_follows_changed_rows(place, rule):
    pool, _ = place.pool(rule)
    rows = place.rows(*[-1] * 6).view(3, 2)[:, 1]  # a column of a block table
    states = place.tokens(3)
    graph, out = capture(lambda: pool.over(rows).step(*states))
    for chosen in ((3, 0, 5), (5, -1, 6), (1, 2, -1)):
        rows.copy_(place.rows(*chosen))
        for state, new_state in zip(states, place.tokens(3), strict=True):
            state.copy_(new_state)
        alone = pool.select(place.rows(*(max(row, 0) for row in chosen)))
        expected = alone.step(*states)
        graph.replay()
        for place_in_batch, row in enumerate(chosen):
            wanted = expected[place_in_batch] if row >= 0 else torch.zeros_like(expected[0])
            assert torch.equal(out[place_in_batch], wanted)


@places
def test_rows_beyond_the_pool_count_as_absent(place):
    pool, blocks = place.pool(RULES[0])
    before = blocks.clone()
    out = pool.over(place.rows(ROWS, 2**31 - 1)).step(*place.tokens(2))
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(blocks, before)


def pool_between_rows(place, rule):
    """Returns a pool that lies in memory between two rows of another one, and the blocks of all rows."""
    pool, blocks = place.pool(rule)
    names = ("k", "v", "scores", "positions", "counts", "seen")
    inner_tensors = {name: t[1:-1] for name, t in zip(names, pool.tensors, strict=True)}
    return KVSlots.from_tensors(**inner_tensors, **rule), blocks


@places
@rules
def test_copies_of_rows_beyond_the_pool_are_empty(place, rule):
    pool, _ = pool_between_rows(place, rule)
    copies = pool.select(place.rows(-1, 2, ROWS - 2, 2**31 - 1))
    expected = contents(pool.select(place.rows(2)))
    nothing = [(0, {})] * HEADS
    assert contents(copies) == [*nothing, *expected, *nothing, *nothing]
    assert not any(t[[0, 2, 3]].any() for t in copies.tensors)


@places
@rules
def test_chunks_without_a_row_attend_to_themselves_and_change_nothing(place, rule):
    pool, blocks = pool_between_rows(place, rule)
    *states, scores = place.tokens(3, 4)
    alone = pool.select(place.rows(0, 2, 0), chunk=4)
    alone.counts[::2], alone.seen[::2] = 0, 0
    expected = alone.extend(*states, scores)
    before = blocks.clone()
    batch = RaggedBatch([0, 4, 8, 12], place.rows(-1, 2, ROWS - 2))
    out = extend_ragged(
        pool, batch, *(t.flatten(0, 1) for t in states), scores.transpose(0, 1).flatten(1)
    )
    assert torch.equal(out.unflatten(0, (3, 4)), expected)
    changed = [row for row in range(ROWS) if not torch.equal(blocks[row], before[row])]
    assert changed == [3]


@places
@rules
def test_rows_that_overflow_float32_equal_the_rows_alone(place, rule):
    """Scores that overflow fp32 are recomputed in double from the row's keys."""
    pool, _ = place.pool(rule)
    for rows in ((6, 0, 3), (2, 6, 4)):
        index = place.rows(*rows)
        q, k, v, scores = place.tokens(3)
        alone = pool.select(index)
        states = (q * 100, k * 100, v, scores)
        expected = alone.step(*states, scale=3e38)
        assert torch.equal(pool.over(index).step(*states, scale=3e38), expected)
