"""The heads that need the fp64 kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import head_rows, load_rows

# Products of two numbers below 2^28, and of their results, stay far inside fp32 and bf16: a score
# below 2^64, ds below 2^66, a gradient below 2^66 2^28 times the number of rows.
LARGEST_PLAIN = tl.constexpr(2.0**28)
# Above this an fp32 score has lost the bits that decide a probability; see lse_low in docs/numerics.md.
LARGEST_PLAIN_LSE = tl.constexpr(2.0**14)


@triton.jit
def out_of_range(tile):
    """Whether an element is NaN or too large for the plain kernels."""
    return tl.max(tl.where(tl.abs(tile.to(tl.float32)) < LARGEST_PLAIN, 0, 1)) != 0


@triton.jit
def range_kernel(
    x, seqlen, heads, group, flags, shape,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Sets flags[b, head // group], [B, Hkv], for heads of x [B, seqlen, heads, D] with such an element."""
    blocks = tl.cdiv(seqlen, BLOCK)
    block = tl.program_id(0) % blocks
    batch = tl.program_id(0) // blocks // heads
    head = tl.program_id(0) // blocks % heads
    rows = block * BLOCK + tl.arange(0, BLOCK)
    tile = load_rows(
        head_rows(x, batch, head), x, rows, rows < seqlen, shape, BLOCK_D, EVEN_D, False
    )
    if out_of_range(tile):
        tl.atomic_or(flags + batch * (heads // group) + head // group, 1)
