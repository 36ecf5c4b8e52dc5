"""The backward kernels.

dq and the row sums of ds come from a loop over keys as in the forward; dk, dv and the key sums of ds from a
loop over the queries to which the block of keys is visible. Each sum has one owner, which adds in
a fixed order: no atomics, and two runs agree to the bit. The price is that scores are computed twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import (
    FLOAT32_MAX,
    LOG2_E,
    add_product,
    broadcast_head,
    head_rows,
    key_range,
    key_tile,
    load_rows,
    matmul,
    out_of_range,
    position_visible,
    saturated,
    scores,
    store_rows,
    weight,
)


class Statistics(NamedTuple):
    """The numbers of each query row that the forward and delta_kernel make: fp32 [B, Hq, Sq], dense."""

    lse: Any
    lse_low: Any
    delta: Any  # dout . out - dlse
    dlse: Any  # the gradient of lse, of this many rows:
    dlse_rows: Any  # Sq, or 0 where there is none


class BiasSums(NamedTuple):
    """Sums of ds, fp32 and dense: over queries [B, Hq, Sk], over keys [B, Hq, Sq]."""

    keys: Any
    rows: Any


@triton.jit
def load_dout(head, dout, rows, exists, shape, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
              SATURATE: tl.constexpr, FP64: tl.constexpr):  # fmt: skip
    """Loads dout. Non-finite elements become 0 with SATURATE; the plain kernels never receive any."""
    tile = load_rows(head, dout, rows, exists, shape, BLOCK_D, EVEN_D, FP64)
    if FP64 and SATURATE:
        tile = tl.where(tl.abs(tile) < float("inf"), tile, 0.0)
    return tile


@triton.jit
def load_dlse(statistics, batch, head, rows, shape):
    index = (batch * shape.heads_q + head).to(tl.int64) * shape.seqlen_q + rows
    return tl.load(statistics.dlse + index, mask=rows < statistics.dlse_rows, other=0.0)


@triton.jit
def delta_kernel(
    dout,
    out,
    statistics,
    flags,
    shape,
    M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr,
):
    """Computes delta = dout . out - dlse [B, Hq, Sq], and checks that dout and dlse are fit for the plain kernels.

    In fp32, summed in the order of dp = dout . v, so that ds of a row that sees only one key is exactly 0.
    """
    blocks = tl.cdiv(shape.seqlen_q, M)
    rows = tl.program_id(0) % blocks * M + tl.arange(0, M)
    batch = tl.program_id(0) // blocks // shape.heads_q
    head = tl.program_id(0) // blocks % shape.heads_q
    exists = rows < shape.seqlen_q
    gradient = load_rows(
        head_rows(dout, batch, head), dout, rows, exists, shape, BLOCK_D, EVEN_D, False
    )
    result = load_rows(
        head_rows(out, batch, head), out, rows, exists, shape, BLOCK_D, EVEN_D, False
    )
    if gradient.dtype == tl.float32:
        products = matmul(gradient, tl.trans(result), shape, False)
        on_diagonal = tl.arange(0, M)[:, None] == tl.arange(0, M)[None, :]
        total = tl.sum(tl.where(on_diagonal, products, 0.0), 1)
    else:
        total = tl.sum(gradient.to(tl.float32) * result.to(tl.float32), 1)
    dlse = load_dlse(statistics, batch, head, rows, shape)
    index = (batch * shape.heads_q + head).to(tl.int64) * shape.seqlen_q + rows
    tl.store(statistics.delta + index, total - dlse, mask=exists)
    if out_of_range(gradient) | out_of_range(dlse):
        heads_kv = shape.heads_q // shape.group
        tl.atomic_or(flags + batch * heads_kv + head // shape.group, 1)


@triton.jit
def row_statistics(statistics, batch, head, rows, shape, FP64: tl.constexpr):
    """Loads lse (in units of log 2 in the plain kernels), its rounding error, and delta. Rows past the end and
    rows that see no key get an lse that makes all their weights 0."""
    index = (batch * shape.heads_q + head).to(tl.int64) * shape.seqlen_q + rows
    exists = rows < shape.seqlen_q
    lse = tl.load(statistics.lse + index, mask=exists, other=-float("inf"))
    lse = tl.where(lse == -float("inf"), float("inf"), lse)
    low = tl.load(statistics.lse_low + index, mask=exists, other=0.0)
    delta = tl.load(statistics.delta + index, mask=exists, other=0.0)
    if not FP64:
        lse = lse * LOG2_E
    return lse, low, delta


@triton.jit
def gradients_of_scores(
    score, slope, dp, lse, lse_low, delta, dt_limit, SATURATE: tl.constexpr, SATURATE_DT: tl.constexpr,
    FP64: tl.constexpr,
):  # fmt: skip
    """Returns p, ds and dt (ds before softcap) of a tile, and the elements that multiply inf and NaN. score is -inf
    for invisible elements."""
    used = (score != -float("inf")) & (lse != float("inf"))  # of a row that exists and sees keys
    if FP64:
        p = weight((score - lse.to(tl.float64)) - lse_low.to(tl.float64), True)
        p = tl.where(used, p, 0.0)  # also where lse is NaN
        if SATURATE:
            used = p != 0
        ds = tl.where(used, p * (dp - delta), 0.0)
        if SATURATE:
            ds = saturated(ds, FLOAT32_MAX)
    else:
        p = weight(score - lse, False)
        ds = p * (dp - delta)
    dt = ds * slope
    if SATURATE_DT:
        dt = saturated(dt, dt_limit)
    return p, ds, dt, used


@triton.jit
def fp64_delta(
    gradient, out_head, out, statistics, batch, head, rows, exists, shape, BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr,
):  # fmt: skip
    result = load_rows(out_head, out, rows, exists, shape, BLOCK_D, EVEN_D, True)
    dlse = load_dlse(statistics, batch, head, rows, shape)
    return tl.sum(gradient * result, 1) - dlse.to(tl.float64)


@triton.jit
def query_gradient_tiles(
    dq, row_sum, query, gradient, rows, lse, lse_low, delta, keys, begin, end, count, k_head, v_head,
    mask_head, bias_head, k, v, mask, bias, intervals, batch, head_kv, shape, dt_limit,
    PARTIAL: tl.constexpr, LISTED: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, SUM_ROWS: tl.constexpr, SATURATE: tl.constexpr, SATURATE_DT: tl.constexpr,
    FP64: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, N):
        index, exists = key_tile(keys, start, count, LISTED, PARTIAL, N)
        key = load_rows(k_head, k, index, exists, shape, BLOCK_D, EVEN_D, FP64)
        value = load_rows(v_head, v, index, exists, shape, BLOCK_D, EVEN_D, FP64)
        products = matmul(query, tl.trans(key), shape, FP64)
        dp = matmul(gradient, tl.trans(value), shape, FP64)
        score, slope = scores(
            products, rows[:, None], index[None, :], mask, bias, mask_head, bias_head, shape,
            MASK, BIAS, SOFTCAP, SATURATE, FP64, ADDEND=False,
        )  # fmt: skip
        if PARTIAL:
            visible = position_visible(
                rows, index, exists, intervals, batch, head_kv, shape, LISTED
            )
            score = tl.where(visible, score, -float("inf"))
        _, ds, dt, _ = gradients_of_scores(
            score,
            slope,
            dp,
            lse[:, None],
            lse_low[:, None],
            delta[:, None],
            dt_limit,
            SATURATE,
            SATURATE_DT,
            FP64,
        )
        if SUM_ROWS:
            row_sum += tl.sum(ds, 1)
        dq = add_product(dq, dt, dt != 0, key, shape, FP64)
    return dq, row_sum


@triton.jit
def query_gradient_kernel(
    q, k, v, mask, bias, intervals, tile_lists, out, dout, statistics, dq, bias_sums, flags, shape,
    dt_limit, gradient_limit,
    LISTED: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, SUM_ROWS: tl.constexpr, SATURATE: tl.constexpr, FP64: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Computes dq of one query tile and head, and the sums of its ds over the keys (SUM_ROWS)."""
    tiles = tl.cdiv(shape.seqlen_q, M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch = tl.program_id(0) // tiles // shape.heads_q
    head = tl.program_id(0) // tiles % shape.heads_q
    head_kv = head // shape.group
    heads_kv = shape.heads_q // shape.group
    if (tl.load(flags + batch * heads_kv + head_kv) != 0) != FP64:
        return
    rows = tile * M + tl.arange(0, M)
    exists = rows < shape.seqlen_q
    query = load_rows(head_rows(q, batch, head), q, rows, exists, shape, BLOCK_D, EVEN_D, FP64)
    gradient = load_dout(
        head_rows(dout, batch, head), dout, rows, exists, shape, BLOCK_D, EVEN_D, SATURATE, FP64
    )
    lse, lse_low, delta = row_statistics(statistics, batch, head, rows, shape, FP64)
    if FP64:
        delta = fp64_delta(
            gradient, head_rows(out, batch, head), out, statistics, batch, head, rows, exists,
            shape, BLOCK_D, EVEN_D,
        )  # fmt: skip
    k_head, v_head = head_rows(k, batch, head_kv), head_rows(v, batch, head_kv)
    mask_head = broadcast_head(mask, batch, head, shape.group)
    bias_head = broadcast_head(bias, batch, head, shape.group)

    WIDE: tl.constexpr = tl.float64 if FP64 else tl.float32
    # In bf16 and fp32 the ds of plain kernels stays within the limits; see LARGEST_PLAIN.
    SATURATE_DT: tl.constexpr = SATURATE and (FP64 or q.data.dtype.element_ty == tl.float16)
    sums = tl.zeros((M, BLOCK_D), WIDE)
    row_sum = tl.zeros((M,), WIDE)
    keys, count, full = key_range(tile, tile_lists, batch, head_kv, shape, LISTED, M, N)
    sums, row_sum = query_gradient_tiles(
        sums, row_sum, query, gradient, rows, lse, lse_low, delta, keys, 0, full, count, k_head, v_head,
        mask_head, bias_head, k, v, mask, bias, intervals, batch, head_kv, shape, dt_limit,
        False, LISTED, MASK, BIAS, SOFTCAP, SUM_ROWS, SATURATE, SATURATE_DT, FP64, N, BLOCK_D,
        EVEN_D,
    )  # fmt: skip
    sums, row_sum = query_gradient_tiles(
        sums, row_sum, query, gradient, rows, lse, lse_low, delta, keys, full, count, count, k_head,
        v_head, mask_head, bias_head, k, v, mask, bias, intervals, batch, head_kv, shape, dt_limit,
        True, LISTED, MASK, BIAS, SOFTCAP, SUM_ROWS, SATURATE, SATURATE_DT, FP64, N, BLOCK_D,
        EVEN_D,
    )  # fmt: skip
    store_rows(
        head_rows(dq, batch, head), dq, rows, exists, sums * shape.scale, shape, gradient_limit,
        BLOCK_D, SATURATE,
    )  # fmt: skip
    if SUM_ROWS:
        if SATURATE:
            row_sum = saturated(row_sum, FLOAT32_MAX)
        index = (batch * shape.heads_q + head).to(tl.int64) * shape.seqlen_q + rows
        tl.store(bias_sums.rows + index, row_sum.to(tl.float32), mask=exists)
