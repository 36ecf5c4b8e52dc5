"""The attention of a step in which every sequence brings any number of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...cache import KVSlots
from ...functional import flash_dmattn_func
from ...keys.select_intervals import select_key_intervals

_LEAST_PLACES = 128  # for pending tokens, where a cache has fewer for its keys


class Chunk(NamedTuple):
    """The tokens [start, stop) of a step, which are of one sequence.

    row: its row in the pool. is_first: they begin the sequence, so that what the row holds is of another one.
    """

    row: int
    start: int
    stop: int
    is_first: bool


class RaggedBatch(NamedTuple):
    """The sequences of a step, whose tokens follow each other.

    chunks: of sequences that bring a part of a prompt; chunk_rows: their rows, int32 [chunks].
    tokens, rows: the tokens of the sequences that bring one, int64 [decoding], and their rows, int32 [decoding]. None: all
        tokens of the step. A negative row is none.
    """

    chunks: list[Chunk]
    chunk_rows: Tensor | None
    tokens: Tensor | None
    rows: Tensor

    @classmethod
    def of_chunks(cls, chunks: list[Chunk], device: torch.device) -> RaggedBatch:
        """The batch of chunks in any order."""
        decoding, longer = [], []
        for chunk in chunks:
            length = chunk.stop - chunk.start
            if length:
                (decoding if length == 1 and not chunk.is_first else longer).append(chunk)
        tokens = torch.tensor([c.start for c in decoding], dtype=torch.int64, device=device)
        rows = torch.tensor([c.row for c in (*longer, *decoding)], dtype=torch.int32, device=device)
        return cls(longer, rows[: len(longer)], tokens, rows[len(longer) :])

    @classmethod
    def of_rows(cls, rows: Tensor) -> RaggedBatch:
        """One token of each row, int32 [T]."""
        return cls([], None, None, rows)


@torch.no_grad()
def attend(
    pool: KVSlots,
    batch: RaggedBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The tokens of a step enter the slots of their sequences and attend to them: out [T, Hq, D].

    pool: the states of one layer. query: [T, Hq, D]; key, value: [T, Hkv, D]; scores: float32 [Hkv, T]. Tokens that belong to
    no sequence are padding; their output is 0.
    """
    if batch.tokens is None:
        return _step(pool, batch.rows, query, key, value, scores, scale=scale)
    out = torch.zeros_like(query)
    if len(batch.tokens):
        at = batch.tokens
        states = (query[at], key[at], value[at], scores[:, at])
        out[at] = _step(pool, batch.rows, *states, scale=scale)
    for number, chunk in enumerate(batch.chunks):
        part = slice(chunk.start, chunk.stop)
        row = batch.chunk_rows[number : number + 1]
        states = (query[None, part], key[None, part], value[None, part], scores[None, :, part])
        out[part] = _attend_to_chunk(pool, row, chunk.is_first, *states, scale=scale)[0]
    return out


def _step(
    pool: KVSlots,
    rows: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    *,
    scale: float,
) -> Tensor:
    states = (t.unsqueeze(1) for t in (query, key, value))
    return pool.over(rows).step(*states, scores.T.unsqueeze(2), scale=scale).squeeze(1)


def _attend_to_chunk(
    pool: KVSlots,
    row: Tensor,
    is_first: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    *,
    scale: float,
) -> Tensor:
    """As `attend` for one sequence: [1, n, Hq, D]."""
    length = query.shape[1]
    if is_first:
        rule = pool.rule._asdict()
        keys = None if pool.rule.has_room_for(length) else select_key_intervals(scores, **rule)
        bias = scores[:, :, None]
        out = flash_dmattn_func(
            query, key, value, None, bias, is_causal=True, key_intervals=keys, scale=scale
        )
        pool.over(row).fill(key, value, scores, keys)
        return out
    # A row of the pool has no places for pending tokens. A copy of it has, for as many as it has keys: copying costs
    # less than their attention.
    slots = pool.select(row, chunk=min(length, max(pool.places, _LEAST_PLACES)))
    out = slots.extend(query, key, value, scores, scale=scale)
    pool.over(row).restore(slots)
    return out
