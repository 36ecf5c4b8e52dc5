"""Doge in vLLM: vLLM's layers with attention over slots."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.llama import LlamaMLP, LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.model_executor.utils import set_weight_attrs

from ...scores import doge_scores_of, score_projection
from ..serving.states import SlotState, states_of
from .interfaces import HasSlots
from .scored_layer import ScoredAttention


class DogeAttention(ScoredAttention):
    def __init__(
        self, config: PretrainedConfig, state: SlotState, vllm_config: VllmConfig, prefix: str
    ):
        bias = config.attention_bias
        super().__init__(
            config, state, vllm_config.quant_config, prefix,
            scores_are_bias=True, bias=bias, bias_o_proj=bias,
        )  # fmt: skip
        # The score of a head comes from the values of all heads, so each process computes a part of every sum.
        self.dt_proj = RowParallelLinear(
            self.heads_kv * self.head_dim, self.heads_kv, bias=bias, prefix=f"{prefix}.dt_proj"
        )
        self.merges_weights = isinstance(self.qkv_proj.quant_method, UnquantizedLinearMethod)
        sizes = {"score_weight": (state.heads_kv, config.hidden_size), "score_bias": state.heads_kv}
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(size, dtype=torch.float32), persistent=False)
        self.A = nn.Parameter(torch.zeros(state.heads_kv))
        set_weight_attrs(self.A, {"weight_loader": sharded_weight_loader(0)})
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, eps=config.rms_norm_eps) for _ in range(2)
        )

    def normalize(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(query), self.k_norm(key)

    def merge_weights(self) -> None:
        """Multiplies the weights of values and scores, as weights_of_product does, once they are loaded."""
        if not self.merges_weights:
            return
        inner = self.qkv_proj.weight[-self.sizes[2] :].float()
        if self.qkv_proj.bias is not None:
            inner = torch.cat([inner, self.qkv_proj.bias[-self.sizes[2] :, None].float()], dim=1)
        product = tensor_model_parallel_all_reduce(self.dt_proj.weight.float() @ inner)
        self.score_weight.copy_(product[self.own_heads, : self.score_weight.shape[1]])
        self.score_bias.copy_(product[self.own_heads, self.score_weight.shape[1] :].sum(1))
        if self.dt_proj.bias is not None:
            self.score_bias += self.dt_proj.bias[self.own_heads]

    def scores_of(self, hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.merges_weights:
            weights = self.score_weight, self.score_bias
            return score_projection(hidden[None], *weights, form="doge", A=self.A)[0]
        step = self.dt_proj(value.flatten(1))[0][None, :, self.own_heads]
        return doge_scores_of(self.A, step)[0]


class DogeDecoderLayer(nn.Module):
    def __init__(
        self, config: PretrainedConfig, state: SlotState, vllm_config: VllmConfig, prefix: str
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DogeAttention(config, state, vllm_config, f"{prefix}.self_attn")
        self.input_residual = nn.Parameter(torch.ones(config.hidden_size))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            vllm_config.quant_config,
            config.mlp_bias,
            prefix=f"{prefix}.mlp",
        )
        self.post_attention_residual = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        added = self.self_attn(positions, self.input_layernorm(hidden))
        hidden = self.input_residual * hidden + added
        return self.post_attention_residual * hidden + self.mlp(
            self.post_attention_layernorm(hidden)
        )


@support_torch_compile(
    dynamic_arg_dims={"input_ids": {0: "b"}, "positions": {0: "b"}, "inputs_embeds": {0: "b"}}
)
class DogeModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        parts = get_tensor_model_parallel_world_size()
        states = states_of(config, vllm_config.model_config.dtype, parts)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, quant_config=vllm_config.quant_config
        )
        self.layers = nn.ModuleList(
            DogeDecoderLayer(config, state, vllm_config, f"{prefix}.layers.{number}")
            for number, state in enumerate(states)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(positions, hidden)
        return self.norm(hidden)


class DogeForCausalLM(nn.Module, HasSlots):
    """transformers' DogeForCausalLM in vLLM, with the same names of weights."""

    hf_to_vllm_mapper = LlamaModel.hf_to_vllm_mapper
    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.model = DogeModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        if self.config.tie_word_embeddings:
            weights = ((name, t) for name, t in weights if not name.startswith("lm_head."))
        loaded = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        for layer in self.model.layers:
            layer.self_attn.merge_weights()
        return loaded
