"""Measures time and memory of a generated token as the text grows, for eager attention over all keys and ours over the window's.

A token of the demo's model is a byte.
"""

import time

import torch
from transformers import DynamicCache

from flash_dmattn.integrations.transformers import DynamicMaskCache
from flash_dmattn.integrations.transformers.compat import CACHE

from .cost import LEAST_POINTS, Cost
from .training import precision_of

CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_CACHES = {"eager": DynamicCache, "flash_dmattn": DynamicMaskCache}
_TOKENS = 12


@torch.no_grad()
def measure_tokens(
    model: torch.nn.Module, implementation: str, seconds: float, seed: int
) -> list[Cost]:
    """Returns the costs of a token and its cache after as many of `CONTEXTS` as fit into `seconds`, at least `LEAST_POINTS`. The model
    reads random bytes, always with flash_dmattn."""
    deadline = time.perf_counter() + seconds
    ids = torch.randint(
        256, (1, CONTEXTS[-1] + _TOKENS), generator=torch.Generator().manual_seed(seed)
    )
    ids = ids.to(model.device)
    model.eval()
    costs, took = [], 0.0
    for length in CONTEXTS:
        if len(costs) >= LEAST_POINTS and time.perf_counter() + 2 * took > deadline:
            break
        began = time.perf_counter()
        cache = _CACHES[implementation](config=model.config)
        with precision_of(model.device):
            model(ids[:, :length], **{CACHE: cache}, logits_to_keep=1)
            model.set_attn_implementation(implementation)
            steps = [_timed(model, ids[:, [at]], cache) for at in range(length, length + _TOKENS)]
            model.set_attn_implementation("flash_dmattn")
        costs.append(Cost(length, min(steps), _mebibytes(cache)))
        took = time.perf_counter() - began
    return costs


def _timed(model: torch.nn.Module, token: torch.Tensor, cache: DynamicCache) -> float:
    began = time.perf_counter()
    model(token, **{CACHE: cache}).logits.sum().item()  # waits for a GPU
    return time.perf_counter() - began


def _mebibytes(cache: DynamicCache | DynamicMaskCache) -> float:
    is_ours = isinstance(cache, DynamicMaskCache)
    tensors = (
        tensor
        for layer in cache.layers
        for tensor in (layer.slots.tensors if is_ours else (layer.keys, layer.values))
    )
    return sum(tensor.nbytes for tensor in tensors) / 2**20
