"""Milliseconds of a token of a Doge model, by the length of the text before it.

    python benchmarks/cuda/generate.py [--contexts 4096 524288] [--sides SIDE...] [--limit SECONDS] [--record FILE]

8 layers, hidden 1024, 8 heads of 128, 4 key heads, window 1024, batch 1, bfloat16, random weights. Sides:

  ours           DynamicMaskCache, one CUDA graph a token
  ours_compiled  the same, of the compiled model
  generate       `generate` with a static DynamicMaskCache, which compiles the step by itself; its own work included
  sdpa_compiled  transformers' StaticCache of all keys, attention by torch's SDPA, compiled, one CUDA graph a token
  eager          transformers' DynamicCache of all keys, eager attention, no graph

Ours reads its whole text, in parts and once for its three sides; the others get random keys instead. Rows go to stdout and into
the record as they come, a side that fails included. stderr tells what runs; a side that takes longer than the limit ends the
program with the place where it is.
"""

import argparse
import copy
import faulthandler
import json
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch
from transformers import DogeConfig, DogeForCausalLM, DynamicCache, StaticCache

from flash_dmattn.benchmark.record import about, write
from flash_dmattn.integrations.transformers import DynamicMaskCache, enable_flash_dmattn

SIZES = {
    "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "keep_window_size": 1024,
}  # fmt: skip
SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
PART = 16384  # tokens of a prompt at a time
CHUNK = 1024  # of these, attended to together by a DynamicMaskCache
TOKENS, ROUNDS = 50, 7  # timed together; median of
ROOM = 2048  # tokens behind the context


BEGAN = time.perf_counter()


def progress(text):
    print(f"{time.perf_counter() - BEGAN:7.1f} s  {text}", file=sys.stderr, flush=True)


def make_model(device, sizes):
    torch.manual_seed(0)
    config = DogeConfig(**sizes, max_position_embeddings=1 << 20, eos_token_id=None)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = DogeForCausalLM(config).to(dtype).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.A)
        torch.nn.init.normal_(layer.self_attn.dt_proj.weight, std=0.1)
    return model


class Reader:
    """Static caches that have read all of a text but its last token. Models of all sides have the same weights, so a text
    is read once."""

    def __init__(self):
        self._read = {}  # by length

    def __call__(self, model, ids):
        length = ids.shape[1]
        if length not in self._read:
            self._read = {length: self._new(model, ids[:, :-1])}
        return copy.deepcopy(self._read[length])

    @staticmethod
    def _new(model, ids):
        cache = DynamicMaskCache(model.config, static=True, chunk=CHUNK)
        for i, part in enumerate(ids.split(PART, dim=1)):
            if i % 8 == 0:
                progress(f"  reading from token {i * PART} on")
            model(part, past_key_values=cache, logits_to_keep=1)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        progress("  read")
        return cache


read = Reader()


def random_keys(model, cache, context):
    """As if the model had read `context` tokens."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    for index in range(config.num_hidden_layers):
        shape = (1, config.num_key_value_heads, context, head_dim)
        key, value = torch.randn((2, *shape), dtype=model.dtype, device=model.device)
        cache.update(key, value, index)


def seconds(call):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def ms_of_token(step):
    """Of steps behind one another: the median of several rounds."""
    step()
    progress("  timing")

    def several():
        for _ in range(TOKENS):
            step()

    return 1e3 * statistics.median(seconds(several) / TOKENS for _ in range(ROUNDS))


def greedy_step(forward, cache, last):
    """A call that reads the last token and writes the next one in its place."""
    token = last.clone()

    def step():
        logits = forward(token, past_key_values=cache, use_cache=True).logits
        token.copy_(logits[:, -1:].argmax(-1))

    return step


def captured(step):
    """The step as a CUDA graph; as it is on the CPU."""
    if not torch.cuda.is_available():
        return step
    progress("  first steps")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    progress("  capture")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def kernels(step):
    """How many kernels and copies a step runs, and their time in ms; nothing on the CPU."""
    if not torch.cuda.is_available():
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    events = [event for event in profile.key_averages() if event.device_type == on_gpu]
    total = sum(event.self_device_time_total for event in events)
    return {"kernels": sum(event.count for event in events), "kernels_ms": round(total / 1e3, 4)}


def held(cache):
    tensors = (
        t
        for layer in cache.layers
        for t in (layer.slots.tensors if hasattr(layer, "slots") else (layer.keys, layer.values))
    )
    return round(sum(t.untyped_storage().nbytes() for t in tensors) / 2**20, 1)


# ---- Sides -----------------------------------------------------------------------------------------


def ours(model, ids, *, is_compiled=False):
    enable_flash_dmattn(model)
    cache = read(model, ids)
    forward = torch.compile(model, fullgraph=True) if is_compiled else model
    step = captured(greedy_step(forward, cache, ids[:, -1:]))
    return {"ms": ms_of_token(step)} | kernels(step), cache


def ours_compiled(model, ids):
    return ours(model, ids, is_compiled=True)


def generate(model, ids):
    enable_flash_dmattn(model)
    cache = read(model, ids)
    state = {"text": ids}

    def tokens(count):
        state["text"] = model.generate(
            state["text"], past_key_values=cache, max_new_tokens=count, do_sample=False, use_cache=True,
            attention_mask=torch.ones_like(state["text"]),
        )  # fmt: skip

    progress("  first tokens, which compile")
    tokens(20)
    progress("  timing")
    few, many = ((seconds(lambda n=n: tokens(n)), n) for n in (20, 220))
    return {"ms": 1e3 * (many[0] - few[0]) / (many[1] - few[1])}, cache


def sdpa_compiled(model, ids):
    model.set_attn_implementation("sdpa")
    context = ids.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=context + ROOM)
    random_keys(model, cache, context)
    step = captured(greedy_step(torch.compile(model, fullgraph=True), cache, ids[:, -1:]))
    return {"ms": ms_of_token(step)} | kernels(step), cache


def eager(model, ids):
    model.set_attn_implementation("eager")
    cache = DynamicCache()
    random_keys(model, cache, ids.shape[1])
    step = greedy_step(model, cache, ids[:, -1:])
    return {"ms": ms_of_token(step)} | kernels(step), cache


SIDES = {f.__name__: f for f in (ours, ours_compiled, generate, sdpa_compiled, eager)}


@torch.no_grad()
def measure(side, context, device, sizes):
    progress(f"{side} at {context}")
    torch._dynamo.reset()
    model = make_model(device, sizes)
    ids = torch.randint(sizes["vocab_size"], (1, context), device=device)
    times, cache = SIDES[side](model, ids)
    times["ms"] = round(times["ms"], 4)
    return {"side": side, "context": context} | times | {"cache_mib": held(cache)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 524288])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a model for a test of this program")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a side")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    method = {"method": f"medians of {ROUNDS} rounds of {TOKENS} tokens behind one another"}
    found = about(options.device, options.commit, ROUNDS) | method
    rows = []
    for context in options.contexts:
        for side in options.sides:
            faulthandler.dump_traceback_later(options.limit, exit=True)
            try:
                row = measure(
                    side, context, options.device, SIZES | (SMALL if options.small else {})
                )
            except Exception as error:  # the other sides are worth their time
                traceback.print_exc(limit=-4)
                row = {"side": side, "context": context, "failed": str(error)[:200]}
            faulthandler.cancel_dump_traceback_later()
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.record:
                write(options.record, found | {"token": rows})


if __name__ == "__main__":
    main()
