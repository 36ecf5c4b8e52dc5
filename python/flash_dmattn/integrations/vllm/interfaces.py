"""The interface of vLLM for models whose sequences have states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsAttentionFree,
    SupportsMambaPrefixCaching,
)

from ..serving.states import SlotState, states_of

PARTS = 32  # of a block; vLLM copies each with one block of threads


def parts_of_block(states: Sequence[SlotState]) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the equal parts of a block that has the states of all layers."""
    size = sum(state.nbytes() for state in states)  # a multiple of 128
    return ((size // PARTS,),) * PARTS


class HasSlots(HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    """A model whose layers have slots. A sequence has one block for all of them, whose parts vLLM copies as bytes.

    It is attention-free to vLLM, which calls only a layer with a paged cache attention.
    """

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...]]:
        model, parts = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
        return parts_of_block(states_of(model.hf_text_config, model.dtype, parts))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.uint8,) * PARTS

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple:
        return (get_temporal_copy_spec,) * PARTS
