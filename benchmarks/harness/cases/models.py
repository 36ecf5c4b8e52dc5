"""Measures a Doge: a training step, the loss of a training, and a generated token as the text before it grows."""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import (
    Cache,
    DogeConfig,
    DogeForCausalLM,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    StaticCache,
)

from flash_dmattn.integrations.transformers import DynamicMaskCache, enable_flash_dmattn
from flash_dmattn.integrations.transformers.compat import CACHE

from .. import record
from ..clock import Rounds, capture_graph, count_kernels, elapsed_ms
from ..machine import BENCHMARKS
from . import runs_everywhere as expect_case_runs  # noqa: F401

_STEPS = Rounds(9, warm_up=3)
# Other programs disturb a CPU more than a GPU.
_TOKEN_ROUNDS = {"cuda": Rounds(7, warm_up=0), "cpu": Rounds(7, "least", warm_up=0)}
_TOKENS = {"cuda": 50, "cpu": 12}  # tokens per round, timed together
_ROOM = 2048  # room for tokens after the context in a static cache of all keys
_PART = 16384  # prompt tokens per forward pass of the model
_CHUNK = 1024  # prompt tokens that a DynamicMaskCache attends to at a time
# Tokens before the generated one.
_LENGTHS = {"cuda": [4096, 524288], "cpu": [256, 1024, 4096, 16384]}
_DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
_SIZES = {
    "cuda": {
        "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "keep_window_size": 1024,
    },
    "cpu": {
        "vocab_size": 256, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "keep_window_size": 256,
    },
}  # fmt: skip


def random_doge(device: str) -> DogeForCausalLM:
    torch.manual_seed(0)
    config = DogeConfig(**_SIZES[device], max_position_embeddings=1 << 20, eos_token_id=None)
    with torch.device(device):
        model = DogeForCausalLM(config).to(getattr(torch, _DTYPES[device]))
    draw_score_weights(model)
    return model


def draw_score_weights(model: DogeForCausalLM) -> None:
    """Randomises the weights that compute scores, because all scores of a new Doge tie. A stays small, because a GPU computes
    gradients in double where exponents reach 8.6."""
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.A, std=0.1)
        torch.nn.init.normal_(layer.self_attn.dt_proj.weight, std=0.1)


def random_llama(device: str, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """Returns a Llama with 8 layers of width 1,024 on a GPU, or 2 layers of width 256 on a CPU. The head dimension is 64, with half as
    many key heads as query heads."""
    hidden, layers = (1024, 8) if device == "cuda" else (256, 2)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=1 << 20,
        attn_implementation="sdpa",
    )  # fmt: skip
    return model_class(config).to(device, getattr(torch, _DTYPES[device])).eval()


def llama_title(model: PreTrainedModel) -> str:
    return f"Llama L{model.config.num_hidden_layers} hidden {model.config.hidden_size}"


def title(device: str) -> str:
    sizes = _SIZES[device]
    return (
        f"Doge L{sizes['num_hidden_layers']} hidden {sizes['hidden_size']} H{sizes['num_attention_heads']} "
        f"Hkv{sizes['num_key_value_heads']} w{sizes['keep_window_size']}"
    )


def _random_ids(device: str, length: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    size = (1, length)
    return torch.randint(_SIZES[device]["vocab_size"], size, generator=generator, device=device)


def rows_of_sides(
    case: str, sides: dict[str, Callable], options: argparse.Namespace
) -> Iterator[dict | record.Failure]:
    """Measures each side and yields its row, or the failure of a side that declines or fails."""
    dtype = _DTYPES[options.device]
    for side, measure in sides.items():
        torch._dynamo.reset()
        try:
            yield record.row(case, side, dtype, **measure())
        except Exception as error:  # the other sides are worth their time
            yield record.Failure(case, side, dtype, error)
        if options.device == "cuda":
            torch.cuda.empty_cache()


def _kernels(step: Callable[[], None], device: str) -> dict:
    """Returns a step's number of kernel launches and their total time as fields of a row; no fields on a CPU."""
    if device == "cpu":
        return {}
    count, ms = count_kernels(step)
    return {"kernels": count, "parts": {"kernels": ms}}


def side_names(name: str, device: str) -> tuple[str, ...]:
    return tuple(
        {"training": LEARNING_SIDES, "training_step": TRAINING_SIDES, "token": GENERATION_SIDES}[
            name
        ]
    )


def measure_rows(name: str, options: argparse.Namespace) -> Iterator[dict]:
    measure = {"training": _trainings, "training_step": _training_steps, "token": _tokens}[name]
    yield from measure(options)


# ---- Training ----------------------------------------------------------------------------------------

_ATTENTION = ("ours", "ours_compiled", "eager", "eager_compiled")
# The `rounded` sides run only if `--side` names them. They round scores to the dtype as eager attention does, which shows the cost of
# float32 scores.
TRAINING_SIDES = (*_ATTENTION, "rounded", "rounded_compiled")


def _training_steps(options: argparse.Namespace) -> Iterator[dict]:
    """Yields the rows of training steps: forward, loss and backward, launches included."""
    for length in options.length or [2048, 8192]:
        chosen = [side for side in TRAINING_SIDES if side in (options.side or _ATTENTION)]
        sides = {
            side: functools.partial(_training_step, side, options.device, length) for side in chosen
        }
        yield from rows_of_sides(
            f"training step N{length}, {title(options.device)}", sides, options
        )


def _training_step(side: str, device: str, length: int) -> dict:
    model = random_doge(device)
    model.config.use_cache = False
    attention, _, compiled = side.partition("_")
    if attention == "eager":
        model.set_attn_implementation("eager")
    else:
        enable_flash_dmattn(model, round_scores_like_eager=attention == "rounded")
    ids = _random_ids(device, length)

    def loss(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    compute = torch.compile(loss, fullgraph=True) if compiled else loss

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        compute(ids).backward()

    both = _STEPS.time_one(lambda: elapsed_ms(step, device))
    return {"both": both, **_STEPS.fields()} | _kernels(step, device)


# Eager attention with another seed shows how far apart two equally good trainings are.
LEARNING_SIDES = {"ours": 0, "eager": 0, "eager_other_seed": 1}


def _trainings(options: argparse.Namespace) -> Iterator[dict]:
    """Trains the model of examples/demo.py with each side, on the same batches."""
    sides = {
        side: functools.partial(_training, side.split("_")[0], seed, options.device)
        for side, seed in LEARNING_SIDES.items()
        if side in (options.side or LEARNING_SIDES)
    }
    yield from rows_of_sides("training of 200 steps N2048 w256", sides, options)


def _training(attention: str, seed: int, device: str) -> dict:
    sys.path.append(str(BENCHMARKS.parent / "examples"))
    from doge_demo.corpus import standard_library
    from doge_demo.training import make_model, train

    torch.manual_seed(seed)
    model = make_model(2048, 256).to(device)
    for layer in model.model.layers:  # otherwise all scores tie, and eager keeps arbitrary keys
        torch.nn.init.normal_(layer.self_attn.A, std=0.1)
    model.set_attn_implementation("flash_dmattn" if attention == "ours" else attention)
    size = {"steps": 200, "seconds": 600, "context": 2048, "batch_size": 2, "seed": 0}
    history = train(model, standard_library(), **size)
    late = history.bits_per_byte[-50:]
    loss = [statistics.mean(late), "bits/byte"]
    mean = {"both": 1e3 * history.seconds / 200, "statistic": "mean", "rounds": 200}
    return mean | {"values": {"loss": loss}}


# ---- Generation --------------------------------------------------------------------------------------


def _tokens(options: argparse.Namespace) -> Iterator[dict]:
    """Yields the rows of one generated token at batch size 1.

    On a GPU, `ours` and `sdpa_compiled` replay a CUDA graph per token; `sdpa_compiled` attends to transformers' StaticCache of all
    keys. `generate` compiles the step itself, and its time includes its own work. `eager` uses transformers' DynamicCache without a
    graph. Our caches have read a text; the others hold random keys.
    """
    default = GENERATION_SIDES if options.device == "cuda" else ("ours", "eager")
    for context in options.length or _LENGTHS[options.device]:
        sides = {
            side: functools.partial(measure, options.device, context)
            for side, measure in GENERATION_SIDES.items()
            if side in (options.side or default)
        }
        with torch.no_grad():
            yield from rows_of_sides(
                f"token after {context}, {title(options.device)}", sides, options
            )


def _our_token(device: str, context: int, compiled: bool = False) -> dict:
    model, cache = _reader(device, context)
    forward = torch.compile(model, fullgraph=True) if compiled else model
    return _timed_token(_greedy_step(forward, cache, device), cache, device)


def _generate(device: str, context: int) -> dict:
    model, cache = _reader(device, context)
    text = _random_ids(device, context)

    def more(count: int) -> None:
        nonlocal text
        text = model.generate(
            text, **{CACHE: cache}, max_new_tokens=count, do_sample=False, use_cache=True,
            attention_mask=torch.ones_like(text),
        )  # fmt: skip

    more(20)  # compiles
    few, many = (elapsed_ms(lambda n=n: more(n), device) for n in (20, 220))
    mean = {"forward": (many - few) / 200, "statistic": "mean", "rounds": 200}
    return mean | {"cache_mib": cache_mib(cache)}


def _sdpa_compiled(device: str, context: int) -> dict:
    model = random_doge(device).eval()
    model.set_attn_implementation("sdpa")
    cache = StaticCache(config=model.config, max_cache_len=context + _ROOM)
    fill_with_random_keys(cache, model, context)
    step = _greedy_step(torch.compile(model, fullgraph=True), cache, device)
    return _timed_token(step, cache, device)


def _eager(device: str, context: int) -> dict:
    model = random_doge(device).eval()
    model.set_attn_implementation("eager")
    cache = DynamicCache()
    fill_with_random_keys(cache, model, context)
    return _timed_token(_greedy_step(model, cache, device), cache, device, graph=False)


GENERATION_SIDES = {
    "ours": _our_token,
    "ours_compiled": functools.partial(_our_token, compiled=True),
    "generate": _generate,
    "sdpa_compiled": _sdpa_compiled,
    "eager": _eager,
}


def _reader(device: str, context: int) -> tuple[DogeForCausalLM, DynamicMaskCache]:
    """Returns a model with our attention, and a cache that has read a text without its last token."""
    model = enable_flash_dmattn(random_doge(device)).eval()
    return model, copy.deepcopy(_read_cache(device, context))


@functools.lru_cache(maxsize=1)
def _read_cache(device: str, context: int) -> DynamicMaskCache:
    """Reads a text once for all sides, whose models have the same weights."""
    model = enable_flash_dmattn(random_doge(device)).eval()
    static = {"static": True, "chunk": _CHUNK} if device == "cuda" else {}
    cache = DynamicMaskCache(model.config, **static)
    for part in _random_ids(device, context)[:, :-1].split(_PART, dim=1):
        model(part, **{CACHE: cache}, logits_to_keep=1)
    return cache


def fill_with_random_keys(cache: Cache, model: PreTrainedModel, context: int) -> None:
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    shape = (2, 1, config.num_key_value_heads, context, head_dim)
    for index in range(config.num_hidden_layers):
        cache.update(*torch.randn(shape, dtype=model.dtype, device=model.device), index)


def _greedy_step(forward: Callable, cache: DynamicCache, device: str) -> Callable[[], None]:
    """Returns a call that feeds the last token to the model and overwrites it with the next one."""
    token = _random_ids(device, 1)

    def step() -> None:
        logits = forward(token, **{CACHE: cache}, use_cache=True).logits
        token.copy_(logits[:, -1:].argmax(-1))

    return step


def _timed_token(step: Callable, cache: DynamicCache, device: str, graph: bool = True) -> dict:
    """Returns the milliseconds and kernel launches per token of a long run."""
    step()
    if device == "cuda" and graph:
        for _ in range(2):
            step()
        step = capture_graph([step])
    step()
    count, rounds = _TOKENS[device], _TOKEN_ROUNDS[device]
    ms = rounds.time_one(lambda: elapsed_ms(lambda: [step() for _ in range(count)], device) / count)
    measured = {"forward": ms, **rounds.fields(), "cache_mib": cache_mib(cache)}
    return measured | _kernels(step, device)


def cache_mib(cache: Cache) -> float:
    tensors = (
        tensor
        for layer in cache.layers
        for tensor in (
            layer.slots.tensors if hasattr(layer, "slots") else (layer.keys, layer.values)
        )
    )
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors) / 2**20
