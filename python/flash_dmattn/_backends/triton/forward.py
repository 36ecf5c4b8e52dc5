"""The forward kernel: a block of queries of one head visits its keys tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    LARGEST_PLAIN_LSE,
    LN_2,
    add_product,
    broadcast_head,
    head_rows,
    key_range,
    key_tile,
    load_rows,
    matmul,
    position_visible,
    scores,
    store_rows,
    weight,
)


@triton.jit
def forward_tiles(
    out, largest, total, query, rows, keys, begin, end, count, k_head, v_head, mask_head, bias_head,
    k, v, mask, bias, intervals, batch, head_kv, shape,
    PARTIAL: tl.constexpr, LISTED: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, SATURATE: tl.constexpr, FP64: tl.constexpr, N: tl.constexpr,
    BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Computes the online softmax over the keys [begin, end) of a query tile's range."""
    for start in range(begin, end, N):
        index, exists = key_tile(keys, start, count, LISTED, PARTIAL, N)
        key = load_rows(k_head, k, index, exists, shape, BLOCK_D, EVEN_D, FP64)
        products = matmul(query, tl.trans(key), shape, FP64)
        score, _ = scores(
            products, rows[:, None], index[None, :], mask, bias, mask_head, bias_head, shape,
            MASK, BIAS, SOFTCAP, SATURATE, FP64, ADDEND=False,
        )  # fmt: skip
        if PARTIAL:
            visible = position_visible(
                rows, index, exists, intervals, batch, head_kv, shape, LISTED
            )
            score = tl.where(visible, score, -float("inf"))
        if FP64 and not SATURATE:  # a NaN stays in the sum, and from there reaches out and lse
            known = score == score
            total += tl.sum(tl.where(known, 0.0, float("nan")), 1)
            score = tl.where(known, score, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        # A row that has seen no key yet must not compute inf - inf.
        base = tl.where(larger == -float("inf"), 0.0, larger)
        rescale = weight(largest - base, FP64)
        weights = weight(score - base[:, None], FP64)
        total = total * rescale + tl.sum(weights, 1)
        out = out * rescale[:, None]
        if FP64 and SATURATE:  # inf * 0: the rows that had it have no weight any more
            out = tl.where((rescale == 0)[:, None], 0.0, out)
        value = load_rows(v_head, v, index, exists, shape, BLOCK_D, EVEN_D, FP64)
        used = (weights != 0) if SATURATE else (score != -float("inf"))
        out = add_product(out, weights, used, value, shape, FP64)
        largest = larger
    return out, largest, total


@triton.jit
def forward_kernel(
    q, k, v, mask, bias, intervals, tile_lists, out, lse, lse_low, flags, shape, out_limit,
    LISTED: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, SATURATE: tl.constexpr, FP64: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Runs one program per query tile and head. Tiles with many keys come first."""
    tiles = tl.cdiv(shape.seqlen_q, M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch = tl.program_id(0) // tiles // shape.heads_q
    head = tl.program_id(0) // tiles % shape.heads_q
    head_kv = head // shape.group
    heads_kv = shape.heads_q // shape.group
    flag = flags + batch * heads_kv + head_kv
    if (tl.load(flag) != 0) != FP64:
        return
    rows = tile * M + tl.arange(0, M)
    exists = rows < shape.seqlen_q
    query = load_rows(head_rows(q, batch, head), q, rows, exists, shape, BLOCK_D, EVEN_D, FP64)
    k_head, v_head = head_rows(k, batch, head_kv), head_rows(v, batch, head_kv)
    mask_head = broadcast_head(mask, batch, head, shape.group)
    bias_head = broadcast_head(bias, batch, head, shape.group)

    WIDE: tl.constexpr = tl.float64 if FP64 else tl.float32
    sums = tl.zeros((M, BLOCK_D), WIDE)
    largest = tl.full((M,), -float("inf"), WIDE)
    total = tl.zeros((M,), WIDE)
    keys, count, full = key_range(tile, tile_lists, batch, head_kv, shape, LISTED, M, N)
    sums, largest, total = forward_tiles(
        sums, largest, total, query, rows, keys, 0, full, count, k_head, v_head, mask_head, bias_head,
        k, v, mask, bias, intervals, batch, head_kv, shape,
        False, LISTED, MASK, BIAS, SOFTCAP, SATURATE, FP64, N, BLOCK_D, EVEN_D,
    )  # fmt: skip
    sums, largest, total = forward_tiles(
        sums, largest, total, query, rows, keys, full, count, count, k_head, v_head, mask_head,
        bias_head, k, v, mask, bias, intervals, batch, head_kv, shape,
        True, LISTED, MASK, BIAS, SOFTCAP, SATURATE, FP64, N, BLOCK_D, EVEN_D,
    )  # fmt: skip

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    # In fp16 the rounding of the weights alone can push a mean past the largest number.
    store_rows(
        head_rows(out, batch, head), out, rows, exists, sums / total[:, None], shape, out_limit,
        BLOCK_D, SATURATE or not FP64,
    )  # fmt: skip
    index = (batch * shape.heads_q + head).to(tl.int64) * shape.seqlen_q + rows
    largest = tl.where(empty, 0.0, largest)
    if FP64:
        high = (largest + tl.log(total)).to(tl.float32)
        low = ((largest - high.to(tl.float64)) + tl.log(total)).to(tl.float32)
    else:
        high = (largest + tl.log2(total)) * LN_2
        low = tl.zeros_like(high)
        if tl.max(tl.where(exists & (tl.abs(high) > LARGEST_PLAIN_LSE), 1, 0)) != 0:
            tl.atomic_or(flag, 1)
    tl.store(lse + index, tl.where(empty, -float("inf"), high), mask=exists)
    tl.store(lse_low + index, tl.where(empty, 0.0, low), mask=exists)
