"""TorchTitan 0.3: dynamic mask attention in its decoders, under context parallelism and tensor parallelism too.

    spec = with_dynamic_masks(model_registry("1B"), keep_window_size=2048)   # of torchtitan.models.llama3
    parallelism = ParallelismConfig(
        context_parallel_degree=8, context_parallel_load_balancer=None, spmd_backend="partial_dtensor"
    )
    Trainer.Config(model_spec=spec, parallelism=parallelism, ...)

Every attention layer of the decoder scores each key by the log gate of its value, as `make_scores(..., "gate")` does
from hidden states. Documents of a packed sequence see each other, as with TorchTitan's own ScaledDotProductAttention.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.attention import GQAttention, ScaledDotProductAttention
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.model_spec import ModelSpec

from ..functional import flash_dmattn_func

_FIRST_BIAS = 3.0  # gates begin open: sigmoid(3) = 0.95


class DynamicMaskInnerAttention(ScaledDotProductAttention):
    """The inner attention of a GQAttention in which each query sees the keys with the best learned scores.

    It subclasses ScaledDotProductAttention for `apply_cp_to_forward`, which passes it pieces as DTensors of the mesh
    "cp". These pieces go through context_parallel_dmattn, whose ranks exchange only the keys that later queries see.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        """heads_kv, head_dim: the number of key heads and their dimension. Other fields are as in flash_dmattn_func."""

        heads_kv: int
        head_dim: int
        keep_window_size: int
        recent_window: int = 0
        sink_tokens: int = 0

        def build(self, **kwargs) -> DynamicMaskInnerAttention:
            # Tensor parallelism cuts the scores in the same way as the key heads.
            if self.sharding_config is not None:
                cut = dense_param_placement(tp=spmd.S(0))
                states = {"weight": cut, "bias": cut}
                self.sharding_config = replace(self.sharding_config, state_shardings=states)
            return ScaledDotProductAttention.Config.build(self, **kwargs)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rule = {
            "keep_window_size": config.keep_window_size,
            "recent_window": config.recent_window,
            "sink_tokens": config.sink_tokens,
        }
        self.weight = nn.Parameter(torch.empty(config.heads_kv, config.head_dim))
        self.bias = nn.Parameter(torch.empty(config.heads_kv))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        nn.init.constant_(self.bias, _FIRST_BIAS)

    @staticmethod
    def prepare_cp_metadata(attention_metadata: Any, *, permutation: object = None) -> Any:
        """Returns the metadata of attention over pieces, which equals the metadata of the whole sequence.

        Raises ValueError for a permutation of the sequence: pieces are consecutive, and only later ranks see a key.
        """
        if permutation is not None:
            raise ValueError(
                f"permutation: got {permutation!r}, expected None (context_parallel_load_balancer=None): pieces of the sequence are "
                "consecutive, and have equal work without a load balancer"
            )
        return attention_metadata

    def scores(self, value: Tensor) -> Tensor:
        """Returns the scores of values [B, n, Hkv, D], float32 [B, Hkv, n]."""
        weight, bias = (
            t.to_local() if isinstance(t, DTensor) else t for t in (self.weight, self.bias)
        )
        with torch.autocast(value.device.type, enabled=False):
            z = torch.einsum("bnhd,hd->bhn", value.float(), weight.float())
            return F.logsigmoid(z + bias.float()[:, None])

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        **kwargs,
    ) -> Tensor:
        if attention_masks is not None:
            raise ValueError(
                f"attention_masks: got {type(attention_masks).__name__}, expected None: scores choose the keys"
            )
        if not isinstance(q_BLNH, DTensor):
            return flash_dmattn_func(
                q_BLNH, k_BLNH, v_BLNH, attn_bias=self.scores(v_BLNH), is_causal=is_causal, scale=scale, **self.rule
            )  # fmt: skip
        if not is_causal:
            raise ValueError("is_causal: got False for a sequence in pieces, expected True")
        from ..distributed import context_parallel_dmattn

        query, key, value = (t.to_local() for t in (q_BLNH, k_BLNH, v_BLNH))
        return context_parallel_dmattn(
            query, key, value, self.scores(value), group=q_BLNH.device_mesh, scale=scale, **self.rule
        )  # fmt: skip


def with_dynamic_masks(spec: ModelSpec, keep_window_size: int, **rule: int) -> ModelSpec:
    """Changes the configs of a decoder's spec (llama3, qwen3) to dynamic mask attention, and returns the spec.

    rule: recent_window, sink_tokens, as in flash_dmattn_func.

    Raises ValueError for a model without a GQAttention. When the model is made parallel, it raises for a load balancer
    of context parallelism, or for a backend that gathers all keys.
    """
    layers = [config for _, config, *_ in spec.traverse(GQAttention.Config)]
    if not layers:
        raise ValueError(
            f"spec: got {spec.name!r} without a GQAttention, expected one in each layer"
        )
    for layer in layers:
        layer.inner_attention = DynamicMaskInnerAttention.Config(
            heads_kv=layer.n_kv_heads or layer.n_heads,
            head_dim=layer.head_dim or layer.dim // layer.n_heads,
            keep_window_size=keep_window_size,
            **rule,
        )
    return replace(spec, parallelize_fn=_parallelize_with_pieces_in_order(spec.parallelize_fn))


def _parallelize_with_pieces_in_order(parallelize):
    @functools.wraps(parallelize)
    def checked(model, *, parallel_dims, parallelism, **options):
        if parallel_dims.cp_enabled:
            balancer = parallelism.context_parallel_load_balancer
            DynamicMaskInnerAttention.prepare_cp_metadata(None, permutation=balancer)
            if parallelism.spmd_backend != "partial_dtensor":
                raise ValueError(
                    f"spmd_backend: got {parallelism.spmd_backend!r} with context parallelism, expected 'partial_dtensor': others gather "
                    "all keys before attention"
                )
        return parallelize(model, parallel_dims=parallel_dims, parallelism=parallelism, **options)

    return checked
