"""The sides of attention as tables, pictures and records name them. A new rival is an entry here and a step in sides.py."""

from __future__ import annotations

from typing import NamedTuple


class Side(NamedTuple):
    name: str  # in tables
    label: str  # in pictures
    colour: str  # of matplotlib
    package: str | None = None  # whose version a record needs; None: our own, or torch
    module: str | None = None  # of the package, which the side imports


SIDES = {
    "cuda": Side("ours", "flash_dmattn, CUDA", "tab:blue"),
    "cpu": Side("ours", "flash_dmattn, CPU", "tab:blue"),
    "triton": Side("our Triton backend", "flash_dmattn, Triton", "tab:cyan", "triton", "triton"),
    "sdpa": Side("torch SDPA", "torch SDPA", "tab:gray"),
    "flex": Side("flex_attention", "flex_attention", "tab:orange"),
    "fa2": Side("FlashAttention-2", "FlashAttention-2, dense", "tab:green"),
    "cudnn": Side("cuDNN", "cuDNN, dense", "tab:olive", "cudnn"),
    "fa3": Side("FlashAttention-3", "FlashAttention-3, dense", "tab:red", "fa3-fwd", "fa3_fwd_interface"),
    "fa4": Side("FlashAttention-4", "FlashAttention-4", "tab:purple", "flash-attn-4", "flash_attn.cute"),
    "fla": Side(
        "flash-linear-attention", "flash-linear-attention", "tab:brown", "flash-linear-attention",
        "fla.ops.forgetting_attn.parallel",
    ),
}  # fmt: skip
# Sides of models that measure another package's attention.
MODEL_PACKAGES = dict.fromkeys(("eager", "eager_compiled", "generate"), "transformers")
