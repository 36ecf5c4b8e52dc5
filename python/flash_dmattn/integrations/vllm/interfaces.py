"""The interface of vLLM for models whose sequences have states."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsAttentionFree,
    SupportsMambaPrefixCaching,
)

from ..serving.states import states_of


class HasSlots(HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    """A model whose layers have slots. A sequence has one block for all of them, which vLLM copies as bytes.

    It is attention-free to vLLM, which calls only a layer with a paged cache attention.
    """

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...]]:
        model, parts = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
        states = states_of(model.hf_text_config, model.dtype, parts)
        return ((sum(state.nbytes() for state in states),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype]:
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple:
        return (get_temporal_copy_spec,)
