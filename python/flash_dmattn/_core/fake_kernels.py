"""Fake kernels: shapes, dtypes and strides of the operators' results. Importing this module registers them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .load import NAMESPACE
from .ops import operators
from .signatures import GRADIENTS, Signature


def _require_device_of(first, **others):
    """Raises unless all tensors are on one device: torch calls fake kernels if any argument is a meta tensor."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise TypeError(f"{name}: got a tensor on {tensor.device}, expected {first.device}")


def _register_fake(name: str):
    """Registers a fake kernel, which gets the operator's arguments as a dictionary by name."""
    signature = Signature(getattr(operators, name).default)

    def register(function: Callable[[dict], object]):
        @torch.library.register_fake(f"{NAMESPACE}::{name}")
        def fake(*arguments):
            named = signature.arguments_by_name(arguments)
            first, *others = signature.tensors
            _require_device_of(named[first], **{other: named[other] for other in others})
            return function(named)

        return function

    return register


@_register_fake("forward")
def _forward_fake(named):
    return _attention_results(named["q"], named["v"])


def _attention_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Makes empty tensors for out and the statistics (lse first)."""
    batch, seqlen_q, heads_q, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((batch, seqlen_q, heads_q, v.shape[3]))
    return out, q.new_empty((2, batch, heads_q, seqlen_q), dtype=lse_dtype)


@_register_fake("select_and_attend")
def _select_and_attend_fake(named):
    bias = named["bias"]
    intervals = bias.new_empty((*bias.shape, 2), dtype=torch.int32)
    return *_attention_results(named["q"], named["v"]), intervals


@_register_fake("backward")
def _backward_fake(named):
    def gradient(name: str, result: str) -> Tensor:
        tensor = named["q"] if named[name] is None else named[name]
        return tensor.new_empty(tensor.shape if named[f"need_{result}"] else (0,))

    return tuple(gradient(name, result) for name, result in GRADIENTS.items())


@_register_fake("select_key_intervals")
def _select_fake(named):
    scores = named["scores"]
    return scores.new_empty((*scores.shape, 2), dtype=torch.int32)


@_register_fake("score_projection")
def _score_projection_fake(named):
    return empty_scores(named["hidden"], named["weight"])


def empty_scores(hidden: Tensor, weight: Tensor) -> Tensor:
    """Makes an empty tensor for the scores [B, H, S] of hidden [B, S, F] and weight [H, F]."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.new_empty((hidden.shape[0], weight.shape[0], hidden.shape[1]), dtype=dtype)


# The six tensors of a KV cache come first: k_cache, v_cache, score_cache, positions, counts, seen.


for _name in ("kv_fill", "kv_append", "kv_commit", "kv_copy_rows"):
    torch.library.register_fake(f"{NAMESPACE}::{_name}", lambda *arguments: None)


@torch.library.register_fake(f"{NAMESPACE}::kv_pending_intervals")
def _kv_pending_intervals_fake(
    k_cache, v_cache, score_cache, positions, counts, seen, rule, threshold, pending, *options
):
    batch, heads = k_cache.shape[:2]
    if k_cache.dim() == 3:  # heads with different numbers of slots
        return k_cache.new_empty((batch, 1, k_cache.shape[1], 2), dtype=torch.int32)
    sinks, recent, _, *windows = rule
    places = sinks + recent + max(windows)
    return k_cache.new_empty((batch, heads, places + pending, 2), dtype=torch.int32)


@torch.library.register_fake(f"{NAMESPACE}::kv_decode_step")
def _kv_decode_step_fake(
    k_cache, v_cache, score_cache, positions, counts, seen, rows, rule, threshold, q, *options
):
    _require_device_of(q, k_cache=k_cache)
    batch, _, heads_q, _ = q.shape
    out = q.new_empty((batch, 1, heads_q, v_cache.shape[-1]))
    return out, q.new_empty((batch, heads_q, 1), dtype=torch.float32)
