"""The gradient of a dense bias."""

from __future__ import annotations

import triton
import triton.language as tl

from .backward import fp64_delta, gradients_of_scores, load_dout, row_statistics
from .tiles import (
    DENSE,
    broadcast_head,
    head_rows,
    load_interval,
    load_rows,
    matmul,
    saturated,
    scores,
)


@triton.jit
def bias_gradient_kernel(
    q, k, v, mask, bias, intervals, out, dout, statistics, dbias, flags, shape, batch_count,
    bias_batches, bias_heads, gradient_limit,
    BY_INTERVALS: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, SATURATE: tl.constexpr,
    FP64: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Computes CHUNK keys of M rows of dbias [.., .., Sq, Sk], summed over all (batch, head) that share the bias.

    A kernel of its own: heads that share a bias are summed without atomics and in a fixed order.
    Tiles of keys and the heads of a tile are one loop, whose loads run ahead of its products.
    """
    chunks = tl.cdiv(shape.seqlen_k, CHUNK)
    tiles_q = tl.cdiv(shape.seqlen_q, M)
    chunk = tl.program_id(0) % chunks
    tile_q = tl.program_id(0) // chunks % tiles_q
    bias_head = tl.program_id(0) // chunks // tiles_q % bias_heads
    bias_batch = tl.program_id(0) // chunks // tiles_q // bias_heads
    batches = batch_count // bias_batches
    heads = shape.heads_q // bias_heads
    heads_kv = shape.heads_q // shape.group
    members = batches * heads
    needs_fp64 = 0
    for member in range(0, members):
        batch = bias_batch * batches + member // heads
        head = bias_head * heads + member % heads
        needs_fp64 = needs_fp64 | tl.load(flags + batch * heads_kv + head // shape.group)
    if (needs_fp64 != 0) != FP64:
        return

    WIDE: tl.constexpr = tl.float64 if FP64 else tl.float32
    rows = tile_q * M + tl.arange(0, M)
    row_exists = rows < shape.seqlen_q
    head_at = (bias_batch * bias_heads + bias_head).to(tl.int64) * shape.seqlen_q
    row_pointers = dbias + (head_at + rows) * shape.seqlen_k
    begin = chunk * CHUNK
    # Causality hides keys past this from every row.
    visible_end = tl.minimum(shape.seqlen_k, tile_q * M + M + shape.reach)
    tiles = tl.cdiv(tl.maximum(tl.minimum(begin + CHUNK, visible_end) - begin, 0), N)
    total = tl.zeros((M, N), WIDE)
    for step in range(0, tiles * members):
        member = step % members
        index = begin + step // members * N + tl.arange(0, N)
        exists = index < shape.seqlen_k
        batch = bias_batch * batches + member // heads
        head = bias_head * heads + member % heads
        head_kv = head // shape.group
        query = load_rows(
            head_rows(q, batch, head), q, rows, row_exists, shape, BLOCK_D, EVEN_D, FP64
        )
        gradient = load_dout(
            head_rows(dout, batch, head),
            dout,
            rows,
            row_exists,
            shape,
            BLOCK_D,
            EVEN_D,
            SATURATE,
            FP64,
        )
        key = load_rows(
            head_rows(k, batch, head_kv), k, index, exists, shape, BLOCK_D, EVEN_D, FP64
        )
        value = load_rows(
            head_rows(v, batch, head_kv), v, index, exists, shape, BLOCK_D, EVEN_D, FP64
        )
        lse, lse_low, delta = row_statistics(statistics, batch, head, rows, shape, FP64)
        if FP64:
            out_head = head_rows(out, batch, head)
            delta = fp64_delta(
                gradient, out_head, out, statistics, batch, head, rows, row_exists, shape, BLOCK_D,
                EVEN_D,
            )  # fmt: skip
        products = matmul(query, tl.trans(key), shape, FP64)
        dp = matmul(gradient, tl.trans(value), shape, FP64)
        score, slope = scores(
            products, rows[:, None], index[None, :], mask, bias,
            broadcast_head(mask, batch, head, shape.group),
            broadcast_head(bias, batch, head, shape.group), shape, MASK, DENSE, SOFTCAP, SATURATE,
            FP64, ADDEND=not FP64,
        )  # fmt: skip
        visible = exists[None, :] & (index[None, :] <= rows[:, None] + shape.reach)
        if BY_INTERVALS:
            first, last = load_interval(intervals, batch, head_kv, index, exists)
            visible = visible & (rows[:, None] >= first[None, :]) & (rows[:, None] < last[None, :])
        score = tl.where(visible, score, -float("inf"))
        _, ds, _, _ = gradients_of_scores(
            score, slope, dp, lse[:, None], lse_low[:, None], delta[:, None], 0.0, SATURATE, False,
            FP64,
        )  # fmt: skip
        total = ds + tl.where(member == 0, 0.0, total)
        summed = tl.full((N,), 0, tl.int32) + member == members - 1  # over all members
        limited = saturated(total, gradient_limit) if SATURATE else total
        tl.store(
            row_pointers[:, None] + index[None, :],
            limited.to(tl.float32).to(dbias.dtype.element_ty),
            mask=row_exists[:, None] & (exists & summed)[None, :],
        )
    nothing = tl.zeros((M, N), dbias.dtype.element_ty)
    end = tl.minimum(begin + CHUNK, shape.seqlen_k)
    for start in range(begin + tl.where(members == 0, 0, tiles) * N, end, N):
        index = start + tl.arange(0, N)
        inside = row_exists[:, None] & (index < end)[None, :]
        tl.store(row_pointers[:, None] + index[None, :], nothing, mask=inside)
