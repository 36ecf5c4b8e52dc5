"""Continuous batching of transformers (`generate_batch`) with slots, for a Doge or a model with learned scores.

A sequence of any length has one block of memory. transformers 5.24 has no hook for another kind of cache. `SlotManager`
is a subclass of its manager whose cache uses `SlotAllocator` instead of the allocator of full attention. transformers'
other classes run unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    CacheAllocator,
)
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.utils import WorkloadHints, stream_context

from ..._core.kv_checks import check_slot_kernels
from ...generation.cache import KVSlots
from ...generation.ragged import RaggedBatch
from ..serving.states import SlotState, states_of
from .compat import CACHE, KEPT_MANAGER, create_processor, drop_slot_manager, store_name

_UNLIMITED = 2**62  # tokens


class SlotAllocator(CacheAllocator):
    """Gives each sequence one block with the states of all layers. To transformers a block is one token, never full."""

    supports_block_sharing = False  # a state describes one whole prefix, and no part of it
    supports_block_table = True
    rows_per_token = 1
    layer_type = FULL_ATTENTION

    def __init__(
        self,
        index: int,
        config,
        num_key_value_heads: int,
        cache_dtype: torch.dtype,
        page_size: int,
        layer_indices: list[int],
        allow_block_sharing: bool,
    ):
        states = states_of(config, cache_dtype)
        self.states = {layer: states[layer] for layer in layer_indices}
        page = max(state.nbytes() for state in self.states.values())
        self.stream = None  # the stream on which the model runs; None: the current stream
        self._before_cache_tensor_init(index, layer_indices, 1, page, allow_block_sharing)
        self.pools: dict[int, KVSlots] = {}

    def register_cache_tensor(self, bytes_per_sector, non_trash_bytes, cache_tensor, pool) -> None:
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        counters = max(state.counter_nbytes() for state in self.states.values())
        pages = self._copy_view.unflatten(1, (len(self.states), self.bytes_per_page))
        self._counters = pages[:, :, :counters]
        for page, (layer, state) in enumerate(self.states.items()):
            self.pools[layer] = state.pool(self._copy_view, page * self.bytes_per_page)

    # ---- Blocks -------------------------------------------------------------------------------------

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return 0 if self.block_table.get(request_id) else 1

    def allocate_cache_to_request(
        self, request_id: str, past_length: int, query_length: int
    ) -> None:
        if self.block_table.get(request_id):
            return
        self.block_table[request_id] = block = self.pool.get_free_blocks(self.index, 1)
        # The block is emptied here, because a prompt's first token may come alone, in a step that reads no lengths and
        # cannot tell that a text begins. The step of the request that had the block before may still be in flight.
        with stream_context(self.stream):
            self._counters[block[0]].zero_()

    # ---- A step -------------------------------------------------------------------------------------

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return past_length + query_length

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return []

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return self.block_table[request_id] * query_length

    def fill_block_table(
        self, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor
    ) -> None:
        block_table[0] = self.block_table[request_id][0]

    def update(self, *args) -> None:
        raise NotImplementedError("slots are written by the attention of their layer")

    def get_cache_for_block_table(self, layer_idx: int) -> None:
        raise NotImplementedError("slots are read by the attention of their layer")


class SlotManager(ContinuousBatchingManager):
    """transformers' manager of requests, with slots."""

    has_slots = True

    def __init__(self, model: PreTrainedModel, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        self.states = _states_of(model)
        parts = self.distributed_helper.tp_size
        if parts > 1:
            raise ValueError(
                f"model: got {parts} parts of it (tensor parallelism), expected 1: the scores of a key head may be made from "
                "all heads"
            )
        # Steps in which every sequence adds one token read their rows from block tables, and read no length on the
        # host, so that a CUDA graph can run them.
        config = self.continuous_batching_config
        config.max_blocks_per_request = 1
        config.use_cuda_graph = (False, config.cuda_graph_booleans[1])

    def switch_to_cb_friendly_attn(
        self, model: PreTrainedModel, auto_switch_to_flash: bool = True
    ) -> None:
        """Gives the model's attention a name under which transformers makes no mask with all (query, key) pairs."""
        layers = _layers_of(model)
        name = model.config._attn_implementation
        if name == layers[0].batched_name:
            return
        self._original_attn_impl = name
        for layer in layers:
            store_name(layer.config, layer.batched_name)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = create_processor(self, SlotAllocator)
        # A state is always read as a whole, and has room for any number of tokens.
        processor.cache.read_cache_limit = 1
        processor.cache.max_decode_fast_path_length = _UNLIMITED
        for allocator in processor.cache.cache_allocators.values():
            allocator.stream = processor.inputs_and_outputs.compute_stream
        return processor


def _layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Returns this package's attention layers in a model."""
    return [module for module in model.modules() if hasattr(module, "batched_name")]


def _states_of(model: PreTrainedModel) -> list[SlotState]:
    return states_of(model.config.get_text_config(), model.dtype)


def make_manager(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: WorkloadHints | None = None,
) -> SlotManager:
    """Does what `PreTrainedModel.init_continuous_batching` does, for a Doge with this package's layers, or a model with
    learned scores."""
    phase = getattr(_layers_of(model)[0], "score_phase", "hard")
    if phase != "hard":
        raise ValueError(
            f"phase: got {phase!r}, which attends to all keys, expected 'hard': model.set_score_phase(\"hard\")"
        )
    states = _states_of(model)
    manager = getattr(model, KEPT_MANAGER, None)
    if isinstance(manager, SlotManager) and manager.states == states:
        manager.switch_to_cb_friendly_attn(model)
        return manager
    drop_slot_manager(model)
    state, *_ = states
    check_slot_kernels(
        "model", state.dtype, state.head_dim, state.value_dim or state.head_dim, model.device,
        instead="Load it with dtype=torch.bfloat16",
    )  # fmt: skip
    generation_config = generation_config or model.generation_config
    if generation_config.eos_token_id is None:
        generation_config.eos_token_id = -1  # transformers takes -1 for no token
    return SlotManager(
        model=model,
        generation_config=generation_config,
        continuous_batching_config=continuous_batching_config
        or getattr(generation_config, "continuous_batching_config", None)
        or ContinuousBatchingConfig(),
        workload_hints=workload_hints,
    )


def batch_of(cache: PagedAttentionCache, arguments: Mapping[str, object]) -> RaggedBatch:
    """Makes the batch of a step from the arguments of the model's forward."""
    allocator = cache.cache_allocators.get(FULL_ATTENTION)
    if not isinstance(allocator, SlotAllocator):
        raise TypeError(
            f"{CACHE}: got a paged cache without slots, expected that of model.init_continuous_batching or generate_batch"
        )
    table = arguments.get("block_table")
    if table is not None:
        # Sequences that pad a CUDA graph have the row -1, which means no row.
        return RaggedBatch.of_rows(table[allocator.index, :, 0])
    first = arguments["cu_seq_lens_q"][:-1]
    indices = arguments["write_index"][allocator.index]
    rows = indices[first.long().clamp(max=len(indices) - 1)].int()  # some sequences are padding
    starts = arguments["cu_seq_lens_q"].tolist()
    ends = arguments["cu_seq_lens_k"][FULL_ATTENTION].tolist()
    begins = [
        after - before == stop - start
        for (start, stop), (before, after) in zip(pairwise(starts), pairwise(ends), strict=True)
    ]
    return RaggedBatch(starts, rows, begins)
