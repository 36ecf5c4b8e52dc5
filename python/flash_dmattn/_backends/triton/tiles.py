"""Shared by all kernels: views of tensors, masked loads, the keys of a query tile, scores, and stores that saturate.

A kernel exists in two forms. The plain one computes in the inputs' dtype with fp32 sums. Where numbers may
leave the range of fp32 (`range_check.py` decides, per batch and key head), the form with FP64 computes
the same in fp64, straight from the definition in docs/numerics.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
# Products of two numbers below 2^28, and of their results, stay far inside fp32 and bf16: a score
# below 2^64, ds below 2^66, a gradient below 2^66 2^28 times the number of rows.
LARGEST_PLAIN = tl.constexpr(2.0**28)
# Above this an fp32 score has lost the bits that decide a probability; see lse_low in docs/numerics.md.
LARGEST_PLAIN_LSE = tl.constexpr(2.0**14)
TILE_ROWS = tl.constexpr(128)  # queries per tile of a list, a multiple of every kernel's

# The shape of a mask or a bias. KEY: [B, H, 1, Sk]. DENSE: any other, a dense one, read by elements.
NONE, KEY, DENSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Rows(NamedTuple):
    """A tensor [B, S, H, D] with its strides in elements."""

    data: Any
    batch: int
    row: int
    head: int
    column: int


class Broadcast(NamedTuple):
    """A mask or bias: the strides of batch, query head, key head, query and key; 0 where it broadcasts."""

    data: Any
    batch: int
    head_q: int
    head_kv: int
    query: int
    key: int


class Intervals(NamedTuple):
    """Key intervals [B or 1, Hkv or 1, Sk, 2] int32, the last two dimensions dense."""

    data: Any
    batch: int
    head: int


class Shape(NamedTuple):
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    group: int  # query heads per key head
    head_dim: int
    reach: int  # a query sees keys up to its row + reach: Sk - Sq if causal, else Sk
    scale: float
    softcap: float
    mask_value: float  # of a bias
    precision: Any  # of products of fp32 tiles: "ieee" or "tf32", a tl.constexpr


@triton.jit
def head_rows(rows, batch, head):
    """Returns the address of row 0 of a head. Offsets between heads and between rows may exceed 32 bits."""
    return rows.data + batch.to(tl.int64) * rows.batch + head.to(tl.int64) * rows.head


@triton.jit
def load_rows(
    data,
    rows,
    index,
    exists,
    shape,
    BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Loads rows as [index, BLOCK_D], zero for rows that do not exist and past the head dimension. WIDE: in fp64."""
    columns = tl.arange(0, BLOCK_D)
    pointers = data + index.to(tl.int64)[:, None] * rows.row + columns[None, :] * rows.column
    inside = exists[:, None]
    if not EVEN_D:
        inside = inside & (columns < shape.head_dim)[None, :]
    tile = tl.load(pointers, mask=inside, other=0.0)
    return tile.to(tl.float64) if WIDE else tile


@triton.jit
def store_rows(
    data, rows, index, exists, tile, shape, limit,
    BLOCK_D: tl.constexpr, SATURATE: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    pointers = data + index.to(tl.int64)[:, None] * rows.row + columns[None, :] * rows.column
    inside = exists[:, None] & (columns < shape.head_dim)[None, :]
    if SATURATE:
        tile = saturated(tile, limit)
    tl.store(pointers, tile.to(tl.float32).to(data.dtype.element_ty), mask=inside)


@triton.jit
def saturated(x, limit):
    """Clamps x to +-limit; a NaN becomes the positive limit."""
    return tl.where(x < limit, tl.maximum(x, -limit), limit)


@triton.jit
def broadcast_head(part, batch, head, group):
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    return part.data + batch * part.batch + head * part.head_q + (head // group) * part.head_kv


@triton.jit
def load_broadcast(part, head, rows, keys, shape, KIND: tl.constexpr):
    """Loads the elements of a mask or bias, 0 for those that do not exist. rows and keys broadcast."""
    if KIND == KEY:
        values = tl.load(head + keys.to(tl.int64) * part.key, mask=keys < shape.seqlen_k, other=0)
    else:
        exists = (rows < shape.seqlen_q) & (keys < shape.seqlen_k)
        offsets = rows.to(tl.int64) * part.query + keys.to(tl.int64) * part.key
        values = tl.load(head + offsets, mask=exists, other=0)
    return values


@triton.jit
def load_interval(intervals, batch, head_kv, keys, exists):
    """Loads the first and last query of the keys; (0, 0), which is never visible, for keys that do not exist."""
    data = intervals.data + batch.to(tl.int64) * intervals.batch
    data += head_kv.to(tl.int64) * intervals.head
    first = tl.load(data + 2 * keys, mask=exists, other=0)
    last = tl.load(data + 2 * keys + 1, mask=exists, other=0)
    return first, last


@triton.jit
def scores(
    products, rows, keys, mask, bias, mask_head, bias_head, shape,
    MASK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, SATURATE: tl.constexpr,
    FP64: tl.constexpr, ADDEND: tl.constexpr,
):  # fmt: skip
    """Computes scores and the slope of softcap from q . k. Scores are -inf where mask or bias hides the element, and
    NaN where a non-finite number enters and shall show (fp64 and not SATURATE).

    In units of log 2, so that a weight is exp2 of a difference; in natural units with FP64.
    rows, keys: of a shape that broadcasts to that of products.
    ADDEND, in plain kernels: bias and mask are one addend, -inf where they hide, instead of a score replaced by
        -inf; docs/kernels/triton.md has the times of both.
    """
    unit = 1.0 if FP64 else LOG2_E
    if FP64 and not SATURATE:
        known = tl.abs(products) < float("inf")  # in fp64 finite elements have finite products
    slope = 1.0
    if SOFTCAP:
        x = products * (shape.scale / shape.softcap)
        decay = tl.exp(-2.0 * tl.abs(x))
        tanh = tl.where(x < 0, -1.0, 1.0) * (1.0 - decay) / (1.0 + decay)
        score = tanh * (shape.softcap * unit)
        slope = 1.0 - tanh * tanh
    else:
        score = products * (shape.scale * unit)
    veil = 0.0
    if BIAS != NONE:
        value = load_broadcast(bias, bias_head, rows, keys, shape, BIAS).to(products.dtype)
        shown = value > shape.mask_value  # not for a NaN
        if FP64 and not SATURATE:
            known = known & (value < float("inf"))
        if FP64:
            value = tl.where(shown, value, 0.0)
        else:
            # Biases near the limit of fp32 do not overflow here; their rows are computed again in fp64.
            value = tl.minimum(tl.maximum(value * unit, -3e38), 3e38)
        if ADDEND:
            veil = tl.where(shown, value, -float("inf"))
        else:
            score += value
    if MASK != NONE:
        allowed = load_broadcast(mask, mask_head, rows, keys, shape, MASK) != 0
    if ADDEND:
        if MASK != NONE:
            veil = tl.where(allowed, veil, -float("inf"))
        if MASK != NONE or BIAS != NONE:
            score += veil
    else:
        if FP64:  # a NaN goes to the lower end
            score = tl.where(score > -FLOAT32_MAX, tl.minimum(score, FLOAT32_MAX), -FLOAT32_MAX)
            if not SATURATE:
                score = tl.where(known, score, float("nan"))
        if BIAS != NONE:
            score = tl.where(shown, score, -float("inf"))
        if MASK != NONE:
            score = tl.where(allowed, score, -float("inf"))
    return score, slope


@triton.jit
def weight(difference, FP64: tl.constexpr):
    return tl.exp(difference) if FP64 else tl.exp2(difference)


@triton.jit
def matmul(a, b, shape, FP64: tl.constexpr):
    """Returns a @ b, summed in fp32, or in fp64 if FP64."""
    if FP64:
        # The sums over one element keep Triton 3.6 from seeing how narrow the numbers once were: from that
        # it would choose a layout of the fp64 product that it cannot compile.
        product = tl.dot(tl.sum(a[:, :, None], 2), tl.sum(b[:, :, None], 2))
    else:
        product = tl.dot(a, b, input_precision=shape.precision)
    return product


@triton.jit
def add_product(sums, weights, used, x, shape, FP64: tl.constexpr):
    """Returns sums + weights @ x. With FP64, inf and NaN in x count only for `used` elements, for which 0 times them is
    NaN."""
    if FP64:
        infinity = float("inf")
        finite = tl.abs(x) < infinity  # not for a NaN
        product = matmul(weights, tl.where(finite, x, 0.0), shape, True)
        # The number of terms that are not finite, and how many more of them are +inf than -inf.
        used = tl.where(used, 1.0, 0.0).to(tl.float64)
        number = matmul(used, tl.where(finite, 0.0, 1.0).to(tl.float64), shape, True)
        sign_of_x = tl.where(x == infinity, 1.0, tl.where(x == -infinity, -1.0, 0.0)).to(tl.float64)
        sign = tl.where(weights < 0, -1.0, tl.where(weights > 0, 1.0, 0.0)).to(tl.float64)
        excess = matmul(sign * used, sign_of_x, shape, True)
        term = tl.where(excess == number, infinity, float("nan"))
        term = tl.where(excess == -number, -infinity, term)
        sums = sums + tl.where(number == 0, product, term)
    else:
        sums = tl.dot(weights.to(x.dtype), x, sums, input_precision=shape.precision)
    return sums


@triton.jit
def out_of_range(tile):
    """Whether an element is NaN or too large for the plain kernels."""
    return tl.max(tl.where(tl.abs(tile.to(tl.float32)) < LARGEST_PLAIN, 0, 1)) != 0


@triton.jit
def key_range(
    tile, tile_lists, batch, head_kv, shape,
    LISTED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Returns the keys of a query tile: their list (or none), their number, and how many of them, a multiple of
    N, causality and intervals show to all rows."""
    rows_begin = tile * M
    rows_end = tl.minimum(rows_begin + M, shape.seqlen_q)
    if LISTED:
        tiles = tl.cdiv(shape.seqlen_q, TILE_ROWS)
        row = batch * tile_lists.batch + head_kv * tile_lists.head
        index = row.to(tl.int64) * tiles + rows_begin // TILE_ROWS
        keys = tile_lists.keys + tl.load(tile_lists.begin + index)
        count = tl.load(tile_lists.count + index)
        full = tl.load(tile_lists.full + index)
    else:
        keys = tile_lists.keys
        count = tl.maximum(tl.minimum(shape.seqlen_k, rows_end + shape.reach), 0)
        full = tl.maximum(tl.minimum(shape.seqlen_k, rows_begin + shape.reach + 1), 0)
    return keys, count, full // N * N


@triton.jit
def key_tile(keys, start, count, LISTED: tl.constexpr, PARTIAL: tl.constexpr, N: tl.constexpr):
    """Returns the keys at [start, start + N) of a query tile's range, and which of them exist."""
    index = start + tl.arange(0, N)
    exists = (index < count) if PARTIAL else (index >= 0)
    if LISTED:
        index = tl.load(keys + index, mask=exists, other=0)
    return index, exists


@triton.jit
def position_visible(rows, index, exists, intervals, batch, head_kv, shape, LISTED: tl.constexpr):
    """Returns [rows, keys]: whether tails, causality and intervals show an element."""
    if LISTED:
        first, last = load_interval(intervals, batch, head_kv, index, exists)
        return (rows[:, None] >= first[None, :]) & (rows[:, None] < last[None, :])
    return exists[None, :] & (index[None, :] <= rows[:, None] + shape.reach)
