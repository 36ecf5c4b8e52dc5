"""The key-major half of the backward: dk, dv and the sums of ds per key."""

from __future__ import annotations

import triton
import triton.language as tl

from .backward import fp64_delta, gradients_of_scores, load_dout, row_statistics
from .tiles import (
    FLOAT32_MAX,
    add_product,
    broadcast_head,
    head_rows,
    load_interval,
    load_rows,
    matmul,
    saturated,
    scores,
    store_rows,
)


@triton.jit
def key_gradient_tiles(
    dk, dv, key_sum, key, value, index, exists, first, last, head, begin, end, q_head, dout_head,
    out_head, mask_head, bias_head, q, dout, out, mask, bias, statistics, batch, shape, dt_limit,
    PARTIAL: tl.constexpr, BY_INTERVALS: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, SUM_KEYS: tl.constexpr, SATURATE: tl.constexpr,
    SATURATE_DT: tl.constexpr, FP64: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr,
):  # fmt: skip
    """Adds the terms of queries [begin, end) of one head to a block of keys; tiles are [keys, queries]."""
    for start in range(begin, end, M):
        rows = start + tl.arange(0, M)
        row_exists = rows < shape.seqlen_q
        query = load_rows(q_head, q, rows, row_exists, shape, BLOCK_D, EVEN_D, FP64)
        gradient = load_dout(
            dout_head, dout, rows, row_exists, shape, BLOCK_D, EVEN_D, SATURATE, FP64
        )
        lse, lse_low, delta = row_statistics(statistics, batch, head, rows, shape, FP64)
        if FP64:
            delta = fp64_delta(
                gradient, out_head, out, statistics, batch, head, rows, row_exists, shape, BLOCK_D,
                EVEN_D,
            )  # fmt: skip
        products = matmul(key, tl.trans(query), shape, FP64)
        dp = matmul(value, tl.trans(gradient), shape, FP64)
        # AMD's compiler cannot bring the bits of a `where` into the layout of the transposed tile.
        score, slope = scores(
            products, rows[None, :], index[:, None], mask, bias, mask_head, bias_head, shape,
            MASK, BIAS, SOFTCAP, SATURATE, FP64, ADDEND=not FP64,
        )  # fmt: skip
        if PARTIAL:
            if BY_INTERVALS:
                visible = (rows[None, :] >= first[:, None]) & (rows[None, :] < last[:, None])
            else:
                visible = exists[:, None] & (index[:, None] <= rows[None, :] + shape.reach)
            score = tl.where(visible, score, -float("inf"))
        p, ds, dt, used = gradients_of_scores(
            score,
            slope,
            dp,
            lse[None, :],
            lse_low[None, :],
            delta[None, :],
            dt_limit,
            SATURATE,
            SATURATE_DT,
            FP64,
        )
        dv = add_product(dv, p, used, gradient, shape, FP64)
        if SUM_KEYS:
            key_sum += tl.sum(ds, 1)
        dk = add_product(dk, dt, dt != 0, query, shape, FP64)
    return dk, dv, key_sum


@triton.jit
def key_gradient_kernel(
    q, k, v, mask, bias, intervals, order, out, dout, statistics, dk, dv, bias_sums, flags, shape,
    dt_limit, gradient_limit,
    BY_INTERVALS: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    SUM_KEYS: tl.constexpr, SATURATE: tl.constexpr, FP64: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of a block of keys, over all heads of its group, and per head the sums of ds over the
    queries (SUM_KEYS). order: with intervals, the keys in lifetime_order; its last blocks are the longest."""
    heads_kv = shape.heads_q // shape.group
    blocks = tl.cdiv(shape.seqlen_k, N)
    block = tl.program_id(0) % blocks
    batch = tl.program_id(0) // blocks // heads_kv
    head_kv = tl.program_id(0) // blocks % heads_kv
    if (tl.load(flags + batch * heads_kv + head_kv) != 0) != FP64:
        return
    if BY_INTERVALS:
        block = blocks - 1 - block
    index = block * N + tl.arange(0, N)
    exists = index < shape.seqlen_k
    if BY_INTERVALS:
        # order has the strides of the intervals, counted in keys.
        at = batch.to(tl.int64) * (intervals.batch // 2) + head_kv.to(tl.int64) * (
            intervals.head // 2
        )
        index = tl.load(order + at + index, mask=exists, other=0)
        first, last = load_interval(intervals, batch, head_kv, index, exists)
        seen = first < last
        begin = tl.min(tl.where(seen, first, shape.seqlen_q))
        end = tl.max(tl.where(seen, last, 0))
        begin = begin // M * M
        full = end
    else:
        first = index
        last = index
        begin = tl.maximum(block * N - shape.reach, 0) // M * M
        end = shape.seqlen_q
        # From here on every row sees every key of the block.
        full = tl.cdiv(tl.maximum((block + 1) * N - 1 - shape.reach, 0), M) * M
        full = tl.where(
            (block + 1) * N > shape.seqlen_k, end, tl.maximum(tl.minimum(full, end), begin)
        )
    key = load_rows(head_rows(k, batch, head_kv), k, index, exists, shape, BLOCK_D, EVEN_D, FP64)
    value = load_rows(head_rows(v, batch, head_kv), v, index, exists, shape, BLOCK_D, EVEN_D, FP64)

    WIDE: tl.constexpr = tl.float64 if FP64 else tl.float32
    SATURATE_DT: tl.constexpr = SATURATE and (FP64 or q.data.dtype.element_ty == tl.float16)
    dk_sum = tl.zeros((N, BLOCK_D), WIDE)
    dv_sum = tl.zeros((N, BLOCK_D), WIDE)
    for member in range(0, shape.group):
        head = head_kv * shape.group + member
        q_head, dout_head = head_rows(q, batch, head), head_rows(dout, batch, head)
        out_head = head_rows(out, batch, head)
        mask_head = broadcast_head(mask, batch, head, shape.group)
        bias_head = broadcast_head(bias, batch, head, shape.group)
        key_sum = tl.zeros((N,), WIDE)
        dk_sum, dv_sum, key_sum = key_gradient_tiles(
            dk_sum, dv_sum, key_sum, key, value, index, exists, first, last, head, begin, full, q_head,
            dout_head, out_head, mask_head, bias_head, q, dout, out, mask, bias, statistics, batch,
            shape, dt_limit, True, BY_INTERVALS, MASK, BIAS, SOFTCAP, SUM_KEYS, SATURATE, SATURATE_DT,
            FP64, M, BLOCK_D, EVEN_D,
        )  # fmt: skip
        if not BY_INTERVALS:
            dk_sum, dv_sum, key_sum = key_gradient_tiles(
                dk_sum, dv_sum, key_sum, key, value, index, exists, first, last, head, full, end,
                q_head, dout_head, out_head, mask_head, bias_head, q, dout, out, mask, bias,
                statistics, batch, shape, dt_limit, False, False, MASK, BIAS, SOFTCAP, SUM_KEYS,
                SATURATE, SATURATE_DT, FP64, M, BLOCK_D, EVEN_D,
            )  # fmt: skip
        if SUM_KEYS:
            if SATURATE:
                key_sum = saturated(key_sum, FLOAT32_MAX)
            sum_at = (batch * shape.heads_q + head).to(tl.int64) * shape.seqlen_k + index
            tl.store(bias_sums.keys + sum_at, key_sum.to(tl.float32), mask=exists)
    store_rows(
        head_rows(dk, batch, head_kv), dk, index, exists, dk_sum * shape.scale, shape, gradient_limit,
        BLOCK_D, SATURATE,
    )  # fmt: skip
    store_rows(
        head_rows(dv, batch, head_kv),
        dv,
        index,
        exists,
        dv_sum,
        shape,
        gradient_limit,
        BLOCK_D,
        SATURATE,
    )
