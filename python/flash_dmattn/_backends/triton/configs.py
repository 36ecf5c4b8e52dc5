"""Tile sizes: one table, indexed by shapes and dtypes alone, so that results never depend on timing.

queries, keys: rows of a tile. Measured on one H200, with times in ms; bottlenecks: docs/kernels/triton.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True)
class Config:
    queries: int
    keys: int
    warps: int
    stages: int


# {kernel: {largest head dimension: configuration}} for 16-bit dtypes. Two blocks of 4 warps fit on an SM and hide
# each other's softmax and barriers, which one block of 8 cannot: this decides most rows at 128.
# At 256 no variants were compared: halves of the tiles at 128, whose fp32 sums fit into the registers.
_LOW_PRECISION = {
    # D128, N8192 H16, ms: 64 x 64 with 4 warps and 3 stages 0.72 (used). Slower: 2 stages 0.80; 128 x 64 with 8 warps
    # 0.77, with 4 warps 1.05 (spills).
    # D64 with dense masks, N16384 H2, ms: 0.46 (used). Slower: 4 warps 1.02.
    "forward": {64: Config(128, 64, 8, 3), 128: Config(64, 64, 4, 3), 256: Config(64, 32, 4, 2)},
    # N32768 H16 Hkv8 w2048, whole forward, D128: 2.00; 128 x 64 x 8 2.48, 64 x 64 x 4 2.40. Fewer tiles gather
    # fewer rows. D64: 1.44; with 8 warps 2.03.
    "forward by list": {
        64: Config(128, 64, 4, 3),
        128: Config(128, 64, 4, 3),
        256: Config(64, 32, 4, 2),
    },
    # Whole backward, N8192 D128: 2.00; 3 stages 2.17, 64 x 32 2.14, 128 x 64 x 8 2.22, 128 x 32 x 8 2.66. At 64 with
    # dense masks, N16384 H2: 3.0, with 4 warps 3.6; without, 4 warps would be 6 % better.
    "dq": {64: Config(128, 64, 8, 3), 128: Config(64, 64, 4, 2), 256: Config(64, 32, 8, 1)},
    # Reads each row once: no tile is better than another.
    "delta": {256: Config(64, 64, 4, 2)},
    # dk and dv are accumulators of keys x D fp32 each. Whole backward, N32768 w2048 D128: 8.5; 32 x 64 x 4 9.1,
    # 64 x 32 x 4 11.4, 64 x 128 x 8 11.7, 128 x 64 x 8 19.7 (spills). Smaller blocks of keys also hold fewer
    # invisible elements.
    "dkdv": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(32, 64, 8, 1)},
    # Whole backward with dense masks, N32768 H2 at 64: 10.1; 2 stages 10.4, 64 x 128 10.5, 128 x 64 x 8 warps 10.9, 64 x 32
    # 10.9. N4096 H8 at 128: 1.18; 1 stage 1.11, timed but not yet compared with the oracle.
    "dbias": {64: Config(64, 64, 4, 3), 128: Config(64, 64, 4, 2), 256: Config(64, 32, 4, 1)},
}
# For little shared memory: 64 KB of an MI300, 99 KB of a GeForce RTX. Compiled for these two with a dense mask and bias
# all of them fit; several of those above do not. On an H200 with dense masks at 64 forward 1.85 instead of 1.76.
_LOW_PRECISION_LITTLE_SHARED = {
    "forward": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(64, 32, 4, 1)},
    "forward by list": _LOW_PRECISION["forward by list"],
    "dq": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(64, 32, 8, 1)},
    "delta": _LOW_PRECISION["delta"],
    "dkdv": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(32, 32, 4, 1)},
    "dbias": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 1), 256: Config(64, 32, 4, 1)},
}
# fp32 products use tensor cores, whose 10-bit mantissa shows, only with tf32. Otherwise they are unrolled multiply-adds,
# whose code grows with the tile.
_FLOAT32 = {64: Config(32, 32, 4, 2), 256: Config(32, 32, 8, 1)}
_FLOAT32_LITTLE_SHARED = {
    64: Config(32, 32, 4, 1),
    128: Config(32, 32, 8, 1),
    256: Config(16, 16, 4, 1),
}
# fp64, for numbers beyond fp32. Rare: small tiles compile quickly.
_FP64 = {256: Config(16, 16, 4, 1)}


@cache
def has_little_shared_memory(device: torch.device) -> bool:
    """Whether a block has less shared memory than the 163 KB of an A100.

    FLASH_DMATTN_MAX_SHARED_KB caps it, as it does for the CUDA kernels.
    """
    if device.type == "cpu":  # interpreted
        return False
    index = (
        torch.get_device_module(device).current_device() if device.index is None else device.index
    )
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    cap = 1024 * int(os.environ.get("FLASH_DMATTN_MAX_SHARED_KB", "1024"))
    return min(properties["max_shared_mem"], cap) < 163 * 1024


def choose_config(
    kernel: str, dtype: torch.dtype, block_d: int, *, fp64: bool, little_shared: bool
) -> Config:
    """Returns the configuration of a kernel. kernel: a name of the table."""
    if fp64:
        table = _FP64
    elif dtype == torch.float32:
        table = _FLOAT32_LITTLE_SHARED if little_shared else _FLOAT32
    else:
        table = (_LOW_PRECISION_LITTLE_SHARED if little_shared else _LOW_PRECISION)[kernel]
    return next(config for largest, config in table.items() if block_d <= largest)
