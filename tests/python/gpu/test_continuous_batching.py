"""Continuous batching of a Doge on a GPU uses CUDA graphs for steps in which each sequence has one new token."""

import pytest
import torch

pytest.importorskip("transformers")
from transformers import GenerationConfig

from flash_dmattn.integrations.transformers.compat import HAS_SLOTS_IN_BATCHES

pytestmark = [
    pytest.mark.skipif(not HAS_SLOTS_IN_BATCHES, reason="slots in batches need transformers 5.24"),
]
if HAS_SLOTS_IN_BATCHES:
    from transformers import ContinuousBatchingConfig

    from doge_generation import VOCABULARY, make_model
    from flash_dmattn.integrations.transformers import enable_flash_dmattn


def batched(model, prompts, use_cuda_graph):
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=24)
    config = ContinuousBatchingConfig(
        num_blocks=64, max_batch_tokens=256, use_cuda_graph=use_cuda_graph
    )
    done = model.generate_batch(prompts, greedy, config)
    assert all(result.error is None for result in done.values())
    return [result.generated_tokens for result in done.values()]


def test_graphs_and_padding_change_no_tokens():
    torch.manual_seed(0)
    model = enable_flash_dmattn(make_model(window=64).to("cuda", torch.bfloat16))
    prompts = [torch.randint(3, VOCABULARY, (length,)).tolist() for length in (40, 70, 100, 33)]
    without = batched(model, prompts, use_cuda_graph=False)
    assert batched(model, prompts, use_cuda_graph=True) == without
    # Three sequences use the graph for four, whose last row is negative.
    assert batched(model, prompts[:3], use_cuda_graph=True) == without[:3]
