"""The models under a version of vLLM that is not supported: each raises, with the reason."""

from __future__ import annotations

import vllm
from torch import Tensor, nn

from . import reason_against


class RefusedDogeForCausalLM(nn.Module):
    """In the place of a Doge, which vLLM itself would run without its scores."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        raise ValueError(reason_against(vllm.__version__))

    # vLLM asks for these before it makes a model.
    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError


class RefusedScoredLlamaForCausalLM(RefusedDogeForCausalLM):
    pass
