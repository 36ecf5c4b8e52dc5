"""The attention of a layer in vLLM. Each sequence has one block of memory as its state, as in state-space models. It holds the
states of all layers, whose sizes differ, so that no layer is padded to the largest.

vLLM gives a sequence a block when the sequence begins, and takes it back when the sequence ends, is cancelled or is
preempted (it then begins again). vLLM copies blocks when it caches prefixes. Block 0 belongs to no sequence.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.short_conv_attn import (
    ShortConvAttentionBackend,
    ShortConvAttentionMetadata,
    ShortConvAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.kv_cache_interface import KVCacheSpec

from ...generation.cache import KVSlots
from ...generation.ragged import extend_ragged
from ...generation.ragged_batch import RaggedBatch, copy_to_device
from ..serving.states import SlotState
from .interfaces import PARTS, parts_of_block
from .settings import OPERATOR


class SlotMetadata(ShortConvAttentionMetadata):
    """batch: the sequences of a step. length: the number of its tokens; tensors may have more, as padding."""

    batch: RaggedBatch
    length: int


class SlotMetadataBuilder(ShortConvAttentionMetadataBuilder):
    """Makes the metadata of a step. vLLM's runners know the class above by name."""

    metadata_cls = SlotMetadata
    needs_causal_conv1d_metadata = False
    supports_update_block_table = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        self._layers = [layer for name in layer_names for layer in context[name].group]
        most = vllm_config.scheduler_config.max_num_seqs
        self._rows = torch.empty(most, dtype=torch.int32, device=device)  # CUDA graphs read it

    def build(self, common_prefix_len, common_attn_metadata, *args, **kwargs) -> SlotMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        parts = (metadata.state_indices_tensor_d, metadata.state_indices_tensor_p)
        blocks = torch.cat([part.flatten() for part in parts if part is not None])
        offsets = common_attn_metadata.query_start_loc_cpu.tolist()
        lengths = [stop - start for start, stop in pairwise(offsets)]
        tokens_so_far = common_attn_metadata.seq_lens_cpu_upper_bound.tolist()
        begins = [length == so_far for length, so_far in zip(lengths, tokens_so_far, strict=False)]
        rows = torch.where(blocks == NULL_BLOCK_ID, -1, blocks)
        if max(lengths) > 1:
            metadata.batch, metadata.length = RaggedBatch(offsets, rows, begins), offsets[-1]
            return metadata
        # Each token is a sequence's only one, or padding. vLLM also replays a CUDA graph of decoding, which does not
        # handle beginnings, for prompts of one token.
        first = [number for number, begin in enumerate(begins) if begin and lengths[number]]
        if first:
            emptied = blocks[copy_to_device(blocks.device, torch.tensor(first))].long()
            for layer in self._layers:
                layer.pool.counts.index_fill_(0, emptied, 0)
                layer.pool.seen.index_fill_(0, emptied, 0)
        rows = self._rows[: len(rows)].copy_(rows)
        metadata.batch, metadata.length = RaggedBatch.of_rows(rows), len(rows)
        return metadata


class SlotBackend(ShortConvAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "FLASH_DMATTN_SLOTS"

    @staticmethod
    def get_builder_cls() -> type[SlotMetadataBuilder]:
        return SlotMetadataBuilder


class SlotAttention(nn.Module, MambaBase):
    """Attention over the slots of each sequence."""

    def __init__(
        self, state: SlotState, scale: float, prefix: str, *, scores_are_bias: bool = True
    ):
        """
        Args:
            state: the state of one sequence, with the key heads of this process.
            prefix: the name of the layer, which no other layer has.
            scores_are_bias: as in KVSlots.step.
        """
        super().__init__()
        self.state, self.prefix = state, prefix
        self.options = {"scale": scale, "scores_are_bias": scores_are_bias}
        self.pool: KVSlots | None = None
        self._memory: tuple[Tensor, ...] = ()
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"prefix: got {prefix!r}, which another layer has, expected its own")
        others = [layer for layer in layers.values() if isinstance(layer, SlotAttention)]
        # The layers of the model, which share a block of memory.
        self.group: list[SlotAttention] = others[0].group if others else []
        self.group.append(self)
        layers[prefix] = self

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> Tensor:
        """Computes attention of a step, [T, Hq, Dv].

        query: [T, Hq, D]; key: [T, Hkv, D]; value: [T, Hkv, Dv]; scores: float32 [Hkv, T]."""
        out = query.new_empty(*query.shape[:2], value.shape[2])
        getattr(torch.ops.vllm, OPERATOR)(query, key, value, scores, out, self.prefix)
        return out

    # ---- What vLLM asks: only the first layer has memory, of which the others take their parts ----------

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        return super().get_kv_cache_spec(vllm_config) if self is self.group[0] else None

    @property
    def kv_cache(self) -> tuple[Tensor, ...]:
        return self._memory

    @kv_cache.setter
    def kv_cache(self, memory: tuple[Tensor, ...]) -> None:
        """Sets the memory: the parts of each block, uint8 [blocks, bytes], one after the other, or none. Blocks are any distance
        apart."""
        self._memory, self.pool, offset = memory, None, 0
        if len(memory):
            first, size = memory[0], sum(part.shape[1] for part in memory)
            blocks = first.as_strided((len(first), size), (first.stride(0), 1))
        for layer in self.group if self is self.group[0] else ():
            layer.pool = layer.state.pool(blocks, offset) if len(memory) else None
            offset += layer.state.nbytes()

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.CUSTOM

    def get_attn_backend(self) -> type[SlotBackend]:
        return SlotBackend

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return parts_of_block([layer.state for layer in self.group])

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,) * PARTS


def _extend_slots(
    query: Tensor, key: Tensor, value: Tensor, scores: Tensor, out: Tensor, layer_name: str
) -> None:
    context = get_forward_context()
    metadata = context.attn_metadata
    if metadata is None:  # vLLM measures the memory of a step without states
        out.zero_()
        return
    layer = context.no_compile_layers[layer_name]
    metadata = metadata[layer.group[0].prefix]
    length = metadata.length
    states = (t[:length] for t in (query, key, value))
    out[:length] = extend_ragged(
        layer.pool, metadata.batch, *states, scores[:, :length], **layer.options
    )
    out[length:].zero_()


direct_register_custom_op(op_name=OPERATOR, op_func=_extend_slots, mutates_args=["out"])
