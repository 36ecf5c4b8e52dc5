"""Compares ragged steps, in which each sequence has any number of new tokens, with attention over each whole sequence.

They run on any device: `place` has its name, the dtype and the backend.
"""

import pytest
import torch

from flash_dmattn import RaggedBatch, extend_ragged, flash_dmattn_func, select_key_intervals
from flash_dmattn.generation import ragged_batch
from pool_rows import ROWS, contents
from token_streams import TOLERANCE


def tokens_of(place, count):
    """Draws query, key, value [T, H, D] and scores [Hkv, T]."""
    query, key, value, scores = place.tokens(1, count)
    return query[0], key[0], value[0], scores[0]


def whole(place, rule, states, scores_are_bias, softcap):
    """Attends over a whole sequence with the reference backend on the CPU."""
    query, key, value, scores = (t.cpu()[None] for t in states)
    keys = select_key_intervals(scores, **rule)
    bias = scores[:, :, None] if scores_are_bias else None
    return flash_dmattn_func(
        query, key, value, None, bias, is_causal=True, key_intervals=keys, softcap=softcap,
        return_lse=True, backend="reference",
    )  # fmt: skip


def check_sequences_alone(place, rule, draw, *, scores_are_bias=True, softcap=None):
    """Runs texts of many lengths in steps cut at random places, between padding and in rows that other texts used before."""
    torch.manual_seed(draw.randrange(1000))
    pool, _ = place.pool(rule)
    texts = [tokens_of(place, draw.choice((1, 2, 23, 31, 40))) for _ in range(2 * ROWS)]
    for *_, scores in texts:
        scores[torch.rand_like(scores) < 0.2] = torch.nan
    done, waiting, rows = {}, list(range(len(texts))), {}
    parts = {number: [] for number in waiting}
    while waiting or rows:
        while waiting and len(rows) < ROWS:
            number = waiting.pop(0)
            done[number] = 0
            rows[number] = draw.choice([row for row in range(ROWS) if row not in rows.values()])
        running = draw.sample(list(rows), draw.randint(1, len(rows)))
        lengths = [
            min(draw.choice((0, 1, 1, 4, 5, 7, 17, 20, 29)), len(texts[number][0]) - done[number])
            for number in running
        ]
        offsets = [draw.choice((0, 2))]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        padding = draw.choice((0, 3))
        states = [torch.randn_like(t) for t in tokens_of(place, offsets[-1] + padding)]
        for number, start, length in zip(running, offsets, lengths, strict=False):
            text_part = slice(done[number], done[number] + length)
            for index, (step, text) in enumerate(zip(states, texts[number], strict=True)):
                if index == 3:
                    step[:, start : start + length] = text[:, text_part]
                else:
                    step[start : start + length] = text[text_part]
        batch = RaggedBatch(
            offsets,
            place.rows(*(rows[number] for number in running)),
            [done[number] == 0 for number in running],
        )
        out, lse = extend_ragged(
            pool, batch, *states, scores_are_bias=scores_are_bias, softcap=softcap, return_lse=True
        )
        assert not out[: offsets[0]].any() and not out[offsets[-1] :].any()
        for number, start, length in zip(running, offsets, lengths, strict=False):
            part = slice(start, start + length)
            parts[number].append((out[part].cpu(), lse[:, part].cpu()))
            done[number] += length
            if length and done[number] == len(texts[number][0]):
                del rows[number]
    tolerance = TOLERANCE[place.dtype]
    for number, states in enumerate(texts):
        out, lse = whole(place, rule, states, scores_are_bias, softcap)
        for got, expected in (
            (torch.cat([part[0] for part in parts[number]]), out[0]),
            (torch.cat([part[1] for part in parts[number]], 1), lse[0]),
        ):
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def check_kept_keys_of_padded_chunks(place, rule):
    """Compares the pool after steps whose chunks run together, and their results, with those of each chunk alone."""
    torch.manual_seed(7)
    pool, _ = place.pool(rule)
    alone = pool.snapshot()
    offsets, order = [0, 12, 13, 33, 40, 56, 57], (3, 1, 6, 0, 5, 2)
    for _ in range(3):
        states = tokens_of(place, offsets[-1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ragged_batch._CHUNK_PADDING, place.device, 2)
            batch = RaggedBatch(offsets, place.rows(*order))
        assert [len(group.rows) for group in batch._groups] == [4, 2]
        out, lse = extend_ragged(pool, batch, *states, return_lse=True)
        for start, stop, row in zip(offsets, offsets[1:], order, strict=False):
            one = [t[start:stop] for t in states[:3]]
            own_out, own_lse = extend_ragged(
                alone, RaggedBatch([0, stop - start], place.rows(row)), *one, states[3][:, start:stop], return_lse=True
            )  # fmt: skip
            tolerance = TOLERANCE[place.dtype]
            for got, expected in ((out[start:stop], own_out), (lse[:, start:stop], own_lse)):
                torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
        assert contents(pool) == contents(alone)
