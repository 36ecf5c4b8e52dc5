"""Llama with learned scores (`add_learned_scores`) in vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from .._shared.config_rules import LearnedScores
from .._shared.scorers import make_scorer
from ..serving.states import states_of
from .interfaces import HasSlots
from .scored_layer import ScoredAttention


class ScoredLlamaAttention(ScoredAttention):
    """An attention layer in the phase "hard": scores decide which keys stay, and change nothing else."""

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        quant_config: object = None,
        bias: bool = False,
        bias_o_proj: bool = False,
        prefix: str = "",
        **others,
    ):
        """Makes a layer. others: arguments of vLLM's own layer, which this layer reads from `config` instead."""
        parts = get_tensor_model_parallel_world_size()
        states = states_of(config, get_current_vllm_config().model_config.dtype, parts)
        state = states[extract_layer_index(prefix)]
        super().__init__(
            config, state, quant_config, prefix,
            scores_are_bias=False, bias=bias, bias_o_proj=bias_o_proj,
        )  # fmt: skip
        kind = LearnedScores.from_config(config).scorer
        features = self.heads_kv * self.head_dim
        self.scorer = make_scorer(kind, config.hidden_size, self.heads_kv, features, None)

    def scores_of(self, hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = self.scorer(hidden[None], key[None], value[None])[0]  # from `hidden`: all heads
        return scores[self.own_heads] if len(scores) == self.heads_kv else scores


class ScoredLlamaForCausalLM(LlamaForCausalLM, HasSlots):
    """The model for checkpoints of a Llama or a Mistral with `add_learned_scores`.

    Run vLLM with `--hf-overrides '{"architectures": ["ScoredLlamaForCausalLM"]}'`. ScoredLlamaConfig refuses other
    families.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        layer = partial(LlamaDecoderLayer, attn_layer_type=ScoredLlamaAttention)
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer)
        self._scores = Path(vllm_config.model_config.model, "learned_scores.safetensors")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        # The file of save_scores names parameters "layer.name". As in load_scores it precedes the model's own scorers.
        # vLLM may pass its tensors, too, unless an index of the model's files leaves it out.
        scores = load_file(self._scores) if self._scores.is_file() else {}
        model_weights = ((name, tensor) for name, tensor in weights if name not in scores)
        score_weights = (
            (f"model.layers.{layer}.self_attn.scorer.{name}", scores[f"{layer}.{name}"])
            for layer, name in (name.split(".", 1) for name in scores)
        )
        return super().load_weights(chain(model_weights, score_weights))
