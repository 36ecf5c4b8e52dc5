"""A training step of an 8-layer Doge in bf16 on a GPU: ours and eager attention, each as it is and compiled.

    python benchmarks/cuda/training_step.py [--lengths 2048 8192] [--json FILE]

Milliseconds of forward, loss and backward (medians of whole steps, launches included), the sum of kernel times of a
step, and with --graph a step replayed as one CUDA graph. --rounded adds our attention over scores in bf16: what those
in float32 cost. Hidden size 1024, 8 query heads, 4 key heads, D 128, w 1024.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import DogeConfig, DogeForCausalLM

from flash_dmattn.integrations.transformers import enable_flash_dmattn

REPEATS = 9


def make_model(length, implementation):
    torch.manual_seed(0)
    config = DogeConfig(
        vocab_size=32768, hidden_size=1024, intermediate_size=2048, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=length, keep_window_size=1024,
        use_cache=False,
    )  # fmt: skip
    model = DogeForCausalLM(config).to("cuda", torch.bfloat16)
    for layer in model.model.layers:  # else all scores tie
        torch.nn.init.normal_(layer.self_attn.A, std=0.1)
    if implementation != "eager":
        return enable_flash_dmattn(model, round_scores_like_eager=implementation == "rounded")
    model.set_attn_implementation("eager")
    return model


def step_of(model, ids, compiled):
    def loss(ids):
        return model(input_ids=ids, labels=ids).loss

    if compiled:
        torch._dynamo.reset()
        loss = torch.compile(loss, fullgraph=True)

    def step():
        for parameter in model.parameters():
            parameter.grad = None
        loss(ids).backward()

    return step


def median_ms(step):
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return round(statistics.median(times), 2)


def kernel_ms(step):
    """The sum of the times of all kernels of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    total = sum(event.self_device_time_total for event in profile.key_averages())
    return round(total / 1e3, 2)


def graph_ms(step):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    return median_ms(graph.replay)


def measure(length, implementation, compiled, graph):
    model = make_model(length, implementation)
    ids = torch.randint(0, 32768, (1, length), device="cuda")
    step = step_of(model, ids, compiled)
    begin = time.perf_counter()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    row = {
        "N": length, "attention": implementation, "compiled": compiled,
        "first_steps_s": round(time.perf_counter() - begin, 1),
        "step_ms": median_ms(step), "kernels_ms": kernel_ms(step),
    }  # fmt: skip
    if graph and implementation != "eager":
        row["graph_ms"] = graph_ms(step)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--rounded", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for length in options.lengths:
        for implementation in ("ours", *(["rounded"] if options.rounded else []), "eager"):
            for compiled in (False, True):
                rows.append(measure(length, implementation, compiled, options.graph))
                print(rows[-1], flush=True)
                torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


main()
