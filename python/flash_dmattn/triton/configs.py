"""Tile sizes: one table, chosen by what is known before a launch, so that results never depend on timing.

queries, keys: rows of a tile. Measured on one H200 (benchmarks/records/h200); the losers are named.
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


# {kernel: {largest head dimension: configuration}} for 16-bit dtypes.
_LOW_PRECISION = {
    "forward": {64: Config(128, 64, 4, 3), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 4, 2)},
    # K and V of a tile are both read in two directions: no third stage fits at 128.
    "dq": {64: Config(128, 64, 8, 3), 128: Config(128, 64, 8, 2), 256: Config(64, 32, 8, 1)},
    # dk and dv are accumulators of keys x D fp32 each. With pairs at 64: 10.2 ms; 64 x 128 x 8 warps 10.9,
    # 32 x 128 11.0 (whole backward).
    "dkdv": {64: Config(64, 64, 4, 2), 128: Config(64, 128, 8, 2), 256: Config(32, 64, 8, 1)},
    # With pairs at 64: 10.1 ms; 2 stages 10.4, 64 x 128 10.5, 128 x 64 x 8 warps 10.9, 64 x 32 10.9.
    "dbias": {64: Config(64, 64, 4, 3), 128: Config(64, 64, 4, 2), 256: Config(64, 32, 4, 1)},
}
# fp32 products are not done by tensor cores (their 10-bit mantissa would show): unrolled multiply-adds,
# whose code grows with the tile.
_FLOAT32 = {64: Config(32, 32, 4, 2), 256: Config(32, 32, 8, 1)}
# fp64, for what fp32 cannot hold. Rare: small tiles compile quickly.
_CAREFUL = {256: Config(16, 16, 4, 1)}


def choose(kernel: str, dtype: torch.dtype, block_d: int, careful: bool = False) -> Config:
    """The configuration of "forward", "dq", "dkdv" or "dbias"."""
    if careful:
        table = _CAREFUL
    elif dtype == torch.float32:
        table = _FLOAT32
    else:
        table = _LOW_PRECISION[kernel]
    return next(config for largest, config in table.items() if block_d <= largest)
