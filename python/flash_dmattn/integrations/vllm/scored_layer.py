"""An attention layer for vLLM with slots: projections, rotation and scores."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PretrainedConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope

from ..serving.states import SlotState
from .slots import SlotAttention


class ScoredAttention(nn.Module):
    """An attention layer whose subclasses give keys their scores. Tensor parallelism divides its heads."""

    def __init__(
        self,
        config: PretrainedConfig,
        state: SlotState,
        quant_config: object,
        prefix: str,
        *,
        scores_are_bias: bool,
        bias: bool,
        bias_o_proj: bool,
    ):
        """
        Args:
            state: the state of one sequence, with the key heads of this process.
            scores_are_bias: as in KVSlots.step.
            bias, bias_o_proj: whether the input projections and the output projection have a bias.
        """
        super().__init__()
        parts = get_tensor_model_parallel_world_size()
        heads, self.heads_kv = config.num_attention_heads, state.heads_kv * parts
        self.head_dim = state.head_dim
        first = get_tensor_model_parallel_rank() * state.heads_kv
        self.own_heads = slice(first, first + state.heads_kv)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.head_dim, heads, self.heads_kv,
            bias=bias, quant_config=quant_config, prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.sizes = [n // parts * self.head_dim for n in (heads, self.heads_kv, self.heads_kv)]
        self.o_proj = RowParallelLinear(
            heads * self.head_dim, config.hidden_size,
            bias=bias_o_proj, quant_config=quant_config, prefix=f"{prefix}.o_proj",
        )  # fmt: skip
        self.rotary_emb = get_rope(
            self.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
        )
        self.attn = SlotAttention(
            state, self.head_dim**-0.5, f"{prefix}.attn", scores_are_bias=scores_are_bias
        )

    def normalize(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries and keys [T, H, D] unchanged. Subclasses may normalise them here, before the rotation."""
        return query, key

    def scores_of(self, hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the scores of this process's key heads, float32 [Hkv, T].

        hidden: the layer's input [T, features]. key, value: [T, Hkv, D], the keys after the rotation.
        """
        raise NotImplementedError

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        per_head = (hidden_states.shape[0], -1, self.head_dim)
        query, key, value = (
            t.reshape(per_head) for t in self.qkv_proj(hidden_states)[0].split(self.sizes, dim=-1)
        )
        query, key = (t.flatten(1) for t in self.normalize(query, key))
        query, key = (t.view(per_head) for t in self.rotary_emb(positions, query, key))
        scores = self.scores_of(hidden_states, key, value)
        return self.o_proj(self.attn(query, key, value, scores).flatten(1))[0]
