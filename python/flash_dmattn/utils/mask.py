"""The 1.x module of this name."""

from ..keys.dense import create_mask, relu_mask, topk_indices, topk_mask

__all__ = ["create_mask", "relu_mask", "topk_indices", "topk_mask"]
