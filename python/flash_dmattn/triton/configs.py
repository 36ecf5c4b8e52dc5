"""Tile sizes: one table, chosen by what is known before a launch, so that results never depend on timing.

queries, keys: rows of a tile. Measured on one H200, with times in ms; docs/kernels/triton.md says what binds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    queries: int
    keys: int
    warps: int
    stages: int


# {kernel: {largest head dimension: configuration}} for 16-bit dtypes. Two blocks of 4 warps fit on an SM and hide
# each other's softmax and barriers, where one of 8 waits for itself: that decides most rows at 128.
# At 256 nothing was compared: halves of the tiles at 128, whose fp32 sums fit into the registers.
_LOW_PRECISION = {
    # N8192 H16 D128: 0.72; 128 x 64 with 8 warps 0.77, with 4 (whose sums spill) 1.05; 64 x 64 with 2 stages 0.80.
    # At 64 with pairs, N16384 H2: 0.46; with 4 warps 1.02.
    "forward": {64: Config(128, 64, 8, 3), 128: Config(64, 64, 4, 3), 256: Config(64, 32, 4, 2)},
    # N32768 H16 Hkv8 w2048, whole forward, D128: 2.00; 128 x 64 x 8 2.48, 64 x 64 x 4 2.40. Fewer tiles gather
    # fewer rows. D64: 1.44; with 8 warps 2.03.
    "forward by list": {
        64: Config(128, 64, 4, 3),
        128: Config(128, 64, 4, 3),
        256: Config(64, 32, 4, 2),
    },
    # Whole backward, N8192 D128: 2.00; 3 stages 2.17, 64 x 32 2.14, 128 x 64 x 8 2.22, 128 x 32 x 8 2.66. At 64 with
    # pairs, N16384 H2: 3.0, with 4 warps 3.6; without, 4 warps would be 6 % better.
    "dq": {64: Config(128, 64, 8, 3), 128: Config(64, 64, 4, 2), 256: Config(64, 32, 8, 1)},
    # Reads each row once: any tile will do.
    "delta": {256: Config(64, 64, 4, 2)},
    # dk and dv are accumulators of keys x D fp32 each. Whole backward, N32768 w2048 D128: 8.5; 32 x 64 x 4 9.1,
    # 64 x 32 x 4 11.4, 64 x 128 x 8 11.7, 128 x 64 x 8 19.7 (spills). Smaller blocks of keys also hold fewer pairs
    # that nobody sees.
    "dkdv": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(32, 64, 8, 1)},
    # With pairs at 64: 10.1; 2 stages 10.4, 64 x 128 10.5, 128 x 64 x 8 warps 10.9, 64 x 32 10.9.
    "dbias": {64: Config(64, 64, 4, 3), 128: Config(64, 64, 4, 2), 256: Config(64, 32, 4, 1)},
}
# fp32 products are not done by tensor cores (their 10-bit mantissa would show): unrolled multiply-adds,
# whose code grows with the tile.
_FLOAT32 = {64: Config(32, 32, 4, 2), 256: Config(32, 32, 8, 1)}
# fp64, for what fp32 cannot hold. Rare: small tiles compile quickly.
_CAREFUL = {256: Config(16, 16, 4, 1)}


def choose(kernel: str, dtype: torch.dtype, block_d: int, careful: bool = False) -> Config:
    """The configuration of a kernel: a name of the table."""
    if careful:
        table = _CAREFUL
    elif dtype == torch.float32:
        table = _FLOAT32
    else:
        table = _LOW_PRECISION[kernel]
    return next(config for largest, config in table.items() if block_d <= largest)
