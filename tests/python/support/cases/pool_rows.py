"""Compares views of some rows of a pool, as an engine uses them, with caches that hold only those rows.

They run on any device: `place` has its name, the dtype and the backend.
"""

from typing import NamedTuple

import torch

from flash_dmattn import KVSlots
from flash_dmattn.integrations.serving.states import SlotState
from flash_dmattn.keys.rule import SelectionRule
from token_streams import TOLERANCE

HEADS, GROUP, DIM, ROWS = 2, 3, 16, 7
RULES = (
    {"keep_window_size": 5},
    {"keep_window_size": (3, 5), "sink_tokens": 1, "recent_window": 2},
    {"keep_window_size": 300},
)


class Place(NamedTuple):
    backend: str = ""
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    value_dim: int = DIM

    def tokens(self, batch, length=1):
        """Draws query, key, value and scores."""
        shapes = (HEADS * GROUP, DIM), (HEADS, DIM), (HEADS, self.value_dim)
        states = (torch.randn(batch, length, *shape, device=self.device) for shape in shapes)
        scores = torch.randn(batch, HEADS, length, device=self.device)
        return *(t.to(self.dtype) for t in states), scores

    def rows(self, *rows):
        return torch.tensor(rows, dtype=torch.int32, device=self.device)

    def pool(self, rule):
        """Returns a pool with a prompt of a different length in every row, and its blocks. A block of the engine also has the
        state of another layer and some further bytes."""
        state = SlotState(HEADS, SelectionRule(**rule), DIM, self.dtype, self.value_dim)
        size = 2 * state.nbytes() + 384
        blocks = torch.zeros(ROWS, size, dtype=torch.uint8, device=self.device)
        pool = state.pool(blocks, state.nbytes())
        pool.backend = self.backend
        for row in range(ROWS):
            length = 3 * row + 1 if row % 2 else 40 * row + 1
            pool.over(self.rows(row)).fill(*self.tokens(1, length)[1:])
        return pool, blocks


def contents(cache):
    """Returns the number of tokens per row and head, and an unordered mapping from entry to key, value and score."""
    k, v, scores, entries, counts, seen = (t.cpu() for t in cache.tensors)
    rows = torch.cat([k.float(), v.float(), scores[..., None]], dim=-1)
    entries = entries.flatten(1)  # the slots of one head after those of the head before
    rows = rows.reshape(*entries.shape, -1).tolist()
    head_contents = []
    for b in range(cache.batch):
        for h, (first, _) in enumerate(cache._head_ranges()):
            taken = range(first, first + int(counts[b, h, 0]))
            keys = {int(entries[b, s]): rows[b][s] for s in taken}
            keys.pop(-(2**31), None)
            head_contents.append((int(seen[b]), keys))
    return head_contents


def check_steps_equal_steps_of_copies(place, rule):
    pool, blocks = place.pool(rule)
    for rows in ((4, 0, 6), (6,), (2, 5, 4, 3, 0, 1, 6)) * 4:
        others = [row for row in range(ROWS) if row not in rows]
        before = blocks.clone()
        index, states = place.rows(*rows), place.tokens(len(rows))
        alone = pool.select(index)
        expected = alone.step(*states, return_lse=True)
        for got, wanted in zip(
            pool.over(index).step(*states, return_lse=True), expected, strict=True
        ):
            assert torch.equal(got, wanted)
        assert contents(pool.select(index)) == contents(alone)
        assert torch.equal(blocks[others], before[others])


def check_negative_rows(place, rule):
    pool, blocks = place.pool(rule)
    states = place.tokens(4)
    alone = pool.select(place.rows(0, 3, 1, 2))
    expected = alone.step(*states)
    before = blocks.clone()
    out, lse = pool.over(place.rows(-1, 3, -1, -7)).step(*states, return_lse=True)
    none = [0, 2, 3]
    assert torch.equal(out[none], torch.zeros_like(out[none]))
    assert (lse[none] == -torch.inf).all()
    assert torch.equal(out[1], expected[1])
    others = [row for row in range(ROWS) if row != 3]
    assert torch.equal(blocks[others], before[others])
    before = blocks.clone()
    pool.over(place.rows(-1)).fill(*place.tokens(1, 9)[1:])
    pool.over(place.rows(-1)).restore(pool.select(place.rows(3)))
    pool.over(place.rows(-1, -1)).step(*place.tokens(2))
    assert torch.equal(blocks, before)


def check_neighbours_change_nothing(place, rule):
    _, *prompt = place.tokens(1, 20)
    mine = [place.tokens(1) for _ in range(6)]
    results = []
    for row in (3, 0, 5):
        pool, _ = place.pool(rule)
        pool.over(place.rows(row)).fill(*prompt)
        outs = []
        for states in mine:
            order = torch.randperm(ROWS).tolist()
            around = place.tokens(ROWS)
            for tensor, part in zip(around, states, strict=True):
                tensor[order.index(row)] = part[0]
            outs.append(pool.over(place.rows(*order)).step(*around)[order.index(row)])
        results.append(torch.stack(outs))
    assert all(torch.equal(result, results[0]) for result in results)


def check_filled_rows(place, rule):
    pool, _ = place.pool(rule)
    _, *states = place.tokens(2, 30)
    lengths = place.rows(30, 11)
    index = place.rows(5, 1)
    pool.over(index).fill(*states, lengths=lengths)
    alone = KVSlots(
        2,
        HEADS,
        head_dim=DIM,
        value_dim=place.value_dim,
        dtype=place.dtype,
        device=place.device,
        backend=place.backend,
        **rule,
    )
    alone.fill(*states, lengths=lengths)
    assert contents(pool.select(index)) == contents(alone)
    new = place.tokens(2)
    assert torch.equal(pool.over(index).step(*new), alone.step(*new))


def check_chunks_of_copies(place, rule):
    pool, _ = place.pool(rule)
    states = place.tokens(1, 13)
    index = place.rows(2)
    whole = pool.select(index, chunk=13)
    snapshot = pool.over(index).snapshot()
    assert snapshot.chunk == 0 and contents(snapshot) == contents(whole)
    expected = whole.extend(*states)
    cut = pool.select(index, chunk=4)
    tolerance = TOLERANCE[place.dtype]
    torch.testing.assert_close(cut.extend(*states), expected, atol=tolerance, rtol=tolerance)
    pool.over(index).restore(cut)
    assert contents(pool.select(index)) == contents(whole)


CHECKS = (
    check_steps_equal_steps_of_copies, check_negative_rows, check_neighbours_change_nothing, check_filled_rows,
    check_chunks_of_copies,
)  # fmt: skip


def check_drafts_of_rows(place, rule):
    """Copies rows to a cache with room for drafts and keeps the first drafts. The result equals steps of the kept tokens."""
    pool, _ = place.pool(rule)
    rows, kept = (5, 0, 2), (3, 1, 4)
    index, states = place.rows(*rows), place.tokens(len(rows), 4)
    expected = [pool.over(place.rows(row)).snapshot() for row in rows]
    copies = pool.select(index, chunk=4)
    copies.append(*states[1:])
    out = copies.attend(states[0])
    copies.commit(place.rows(*kept))
    pool.over(index).restore(copies)
    tolerance = TOLERANCE[place.dtype]
    for b, (snapshot, count) in enumerate(zip(expected, kept, strict=True)):
        for i in range(count):
            query, key, value = (t[b : b + 1, i : i + 1] for t in states[:3])
            step = snapshot.step(query, key, value, states[3][b : b + 1, :, i : i + 1])
            torch.testing.assert_close(out[b, i], step[0, 0], atol=tolerance, rtol=tolerance)
        assert contents(pool.select(index[b : b + 1])) == contents(snapshot)
