"""The heads that need the fp64 kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import head_rows, load_rows, out_of_range


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
