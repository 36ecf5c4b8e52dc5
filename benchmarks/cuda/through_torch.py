"""The CUDA backend through PyTorch: time, memory and training, written as one JSON file.

    python benchmarks/cuda/through_torch.py [speed] [clock_under_load] [memory] [training] --record FILE

Times are those of `python -m flash_dmattn bench`.
"""

import argparse
import json
from pathlib import Path

import torch

from flash_dmattn import flash_dmattn_func, select_key_intervals
from flash_dmattn.benchmark.cases import cases_of
from flash_dmattn.benchmark.clock import median_ms
from flash_dmattn.benchmark.record import HEADER, about, line, output_of, write
from flash_dmattn.benchmark.run import measure
from flash_dmattn.check.memory import bytes_of, peak_bytes
from flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils import (
    _flash_dynamic_mask_attention_forward,
)

SPEED_CASES = ("dense", "head_dims", "dma", "groups", "sliding", "documents", "dense_masks")
SIDES = ("cuda", "fa2", "cudnn", "fa3", "fa4", "flex")
REPEATS = 9


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def inputs(batch, heads_q, heads_kv, length, head_dim):
    shapes = [(batch, length, h, head_dim) for h in (heads_q, heads_kv, heads_kv)]
    return [normal(*shape) for shape in shapes]


def speed():
    """The cases of `python -m flash_dmattn bench`, and selection alone."""
    rows = []
    print(HEADER)
    for case in cases_of("cuda", SPEED_CASES):
        for row in measure(case, "bfloat16", "cuda", SIDES, REPEATS, say=lambda text: None):
            print(line(row), flush=True)
            rows.append(row)
    for length in (32768, 524288):
        scores = torch.randn(1, 8, length, device="cuda")
        for selection in ("per_query", "global"):
            ms = median_ms(
                lambda s=selection: select_key_intervals(scores, 2048, selection=s), "cuda", 11
            )
            case = f"selection {selection} 8 rows N{length} w2048"
            rows.append({"case": case, "who": "cuda", "ms": round(ms, 4)})
            print(f"{case}: {ms:.4f} ms", flush=True)
    return rows


def clock_under_load():
    """The SM clock in MHz while dense attention runs, which draws the most power."""
    q, k, v = inputs(1, 16, 16, 32768, 128)
    with torch.no_grad():
        for _ in range(150):  # two seconds, the query of the clock included
            flash_dmattn_func(q, k, v, is_causal=True)
    answer = output_of("nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader")
    answer = ", ".join(answer.splitlines())  # of each GPU
    torch.cuda.synchronize()
    print(f"SM clock under load: {answer}", flush=True)
    return answer


# ---- Memory ------------------------------------------------------------------------------------------


def peak_of(body):
    """Peak bytes that `body` allocates on top of earlier allocations."""
    body()
    return peak_bytes(body, "cuda")[0]


def mask_scenarios():
    """Bytes that forward and backward allocate with a mask and a selection, and those of neither result nor sum.

    As in tests/python/gpu/test_memory_of_a_step.py: beside out, gradients, their fp32 sums (of dk and dv, or where blocks
    own keys of dq) and lse in its four forms.
    """
    batch, heads, length, head_dim, window = 2, 32, 4096, 128, 2048
    q, k, v = inputs(batch, heads, heads, length, head_dim)
    bias = normal(batch, heads, length)
    dout = torch.randn_like(q)
    masks = {
        "None + 3-d": None,
        "3-d + 3-d": torch.rand(batch, heads, length, device="cuda") < 0.9,
        "4-d + 3-d": torch.ones(batch, 1, length, length, dtype=torch.bool, device="cuda").tril(),
        "any 4-d + 3-d": torch.rand(batch, 1, length, length, device="cuda") < 0.9,
    }
    results = []
    for name, mask in masks.items():

        def scenario(mask=mask):
            out = _flash_dynamic_mask_attention_forward(
                q, k, v, mask, bias, length, length, is_causal=True, keep_window_size=window
            )
            return out, *torch.autograd.grad(out, (q, k, v, bias), dout)

        scenario()
        peak, kept = peak_bytes(scenario, "cuda")
        rest = peak - bytes_of(kept) - 4 * bias.numel() - 16 * batch * heads * length
        sums = 4 * (k.numel() + v.numel())
        by_keys = name.startswith("any") or rest < sums
        rest -= 4 * q.numel() if by_keys else sums
        results.append(
            {"scenario": name, "peak_mb": round(peak / 1e6, 3), "extra_mb": round(rest / 1e6, 3)}
        )
    return results


def long_sequence():
    """Peak at N = 131072 against the bytes of inputs, outputs and gradients."""
    length, window = 131072, 2048
    leaves = [*inputs(1, 16, 8, length, 128), normal(1, 8, length)]
    held = sum(t.numel() * t.element_size() for t in leaves)
    dout = torch.randn_like(leaves[0])

    def step():
        q, k, v, bias = leaves
        out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, keep_window_size=window)
        torch.autograd.grad(out, leaves, dout)

    peak = peak_of(step)
    outputs = leaves[0].numel() * 2 + 16 * length * 4
    own = 2 * held + outputs + dout.numel() * 2
    total = peak + held + dout.numel() * 2
    return {
        "case": f"per_query B1 H16 Hkv8 N{length} D128 w{window}",
        "inputs_outputs_gradients_mb": round(own / 1e6, 1),
        "peak_mb": round(total / 1e6, 1),
        "on_top": round(total / own - 1, 4),
    }


def memory():
    results = {"scenarios": mask_scenarios(), "long_sequence": long_sequence()}
    print(json.dumps(results, indent=1), flush=True)
    return results


# ---- Training ----------------------------------------------------------------------------------------


def training(steps=200, context=2048, window=256):
    """The demo's model, trained on the same batches with our attention and with eager attention."""
    from flash_dmattn.demo.corpus import standard_library
    from flash_dmattn.demo.training import make_model, train

    corpus = standard_library()
    curves = {}
    for name in ("flash_dmattn", "eager", "eager, other weights"):
        torch.manual_seed(int("other" in name))
        model = make_model(context, window).cuda()
        for layer in model.model.layers:  # else all scores tie, and eager keeps arbitrary keys
            torch.nn.init.normal_(layer.self_attn.A, std=0.1)
        model.set_attn_implementation(name.split(",")[0])
        history = train(
            model, corpus, steps=steps, seconds=600, context=context, batch_size=2, seed=0
        )
        curves[name] = history
    late = {n: sum(h.bits_per_byte[-50:]) / 50 for n, h in curves.items()}
    result = {
        "steps": steps, "context": context, "window": window, "precision": "autocast bfloat16",
        "mean_bits_per_byte_of_last_50_steps": {n: round(x, 4) for n, x in late.items()},
        "largest_difference_of_a_step": round(max(
            abs(a - b) for a, b in zip(*(curves[n].bits_per_byte for n in ("flash_dmattn", "eager")), strict=True)
        ), 4),
        "gradients_checked_all_finite": curves["flash_dmattn"].gradients_checked,
        "seconds": {n: round(h.seconds, 1) for n, h in curves.items()},
        "bits_per_byte": {n: [round(x, 3) for x in h.bits_per_byte[::10]] for n, h in curves.items()},
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return result


PARTS = {
    "speed": speed,
    "clock_under_load": clock_under_load,
    "memory": memory,
    "training": training,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    record = {
        "what": "the CUDA backend through PyTorch, bf16",
        **about("cuda", options.commit, REPEATS),
    }
    for name in options.parts:
        record[name] = PARTS[name]()
        write(options.record, record)


main()
