"""A model that only raises an error. It has the names of models that vLLM cannot run."""

from __future__ import annotations

from torch import Tensor, nn

from . import reason_to_refuse


class RefusedModel(nn.Module):
    """Raises an error with the reason, because vLLM itself would run a Doge without its scores."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        raise ValueError(reason_to_refuse())

    # vLLM checks that a class has these methods before it makes a model.
    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError
