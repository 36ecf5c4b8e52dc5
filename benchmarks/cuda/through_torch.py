"""The CUDA backend as PyTorch users meet it: time, memory and training, written as one JSON file.

    python benchmarks/cuda/through_torch.py [speed] [memory] [training] --record FILE

Times are medians of CUDA events around the whole call: of the forward with selection and plan, and of the
backward with its plan and all gradients. Rivals are timed in the same run.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_dmattn import flash_dmattn_func, select_key_intervals, sliding_window
from flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils import (
    _flash_dynamic_mask_attention_forward,
)

RIVALS = {"flash-attention-2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
# name: batch, query heads, key heads, N, D, window (0: dense)
CHOSEN = {
    "per_query B1 H16 Hkv8 N32768 D128 w2048": (1, 16, 8, 32768, 128, 2048),
    "per_query B1 H16 Hkv16 N32768 D128 w2048": (1, 16, 16, 32768, 128, 2048),
    "per_query B1 H16 Hkv2 N32768 D128 w2048": (1, 16, 2, 32768, 128, 2048),
    "per_query B2 H32 Hkv32 N4096 D128 w2048": (2, 32, 32, 4096, 128, 2048),
}
PAIRS = {
    "mask and bias B1 H2 Hkv1 N32768 D64 w1024": (1, 2, 1, 32768, 64, 1024),
    "mask and bias B1 H8 Hkv8 N4096 D128 w2048": (1, 8, 8, 4096, 128, 2048),
}


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def inputs(batch, heads_q, heads_kv, length, head_dim):
    shapes = [(batch, length, h, head_dim) for h in (heads_q, heads_kv, heads_kv)]
    return [normal(*shape) for shape in shapes]


def median_ms(body, repeats=11):
    """Of the GPU: it first waits a millisecond, in which Python gets ahead of it, as it is in training."""
    times = []
    for i in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        begin.record()
        body()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def timed(attend, leaves, pairs, head_dim, repeats=11):
    """Milliseconds and useful TFLOP/s: 4 D flops for a visible pair forward, 10 D backward."""
    out = attend(*leaves)
    dout = torch.randn_like(out)
    with torch.no_grad():
        forward = median_ms(lambda: attend(*leaves), repeats)
    wanted = [t for t in leaves if t.requires_grad]
    backward = median_ms(lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True), repeats)
    tflops = [flops * head_dim * pairs / ms * 1e-9 for flops, ms in ((4, forward), (10, backward))]
    keys = ("forward_ms", "backward_ms", "forward_useful_tflops", "backward_useful_tflops")
    return dict(zip(keys, (round(x, 3) for x in (forward, backward, *tflops)), strict=True))


def causal_pairs(length, window=0):
    window = min(window or length, length)
    return window * (window + 1) // 2 + (length - window) * window


def speed():
    results = []

    def add(case, who, **values):
        results.append({"case": case, "who": who, **values})
        print(
            f"{case:46} {who:18} " + "  ".join(f"{k} {v:g}" for k, v in values.items()), flush=True
        )

    for batch, heads, length, head_dim in ((1, 16, 8192, 128), (1, 16, 32768, 128)):
        case = f"dense causal B{batch} H{heads} N{length} D{head_dim}"
        leaves = inputs(batch, heads, heads, length, head_dim)
        pairs = batch * heads * causal_pairs(length)
        add(case, "ours", **timed(
            lambda q, k, v: flash_dmattn_func(q, k, v, is_causal=True), leaves, pairs, head_dim, 5
        ))  # fmt: skip
        transposed = [t.detach().transpose(1, 2).requires_grad_() for t in leaves]
        attention = torch.nn.functional.scaled_dot_product_attention
        for name, backend in RIVALS.items():
            with sdpa_kernel(backend):
                add(case, name, **timed(
                    lambda q, k, v: attention(q, k, v, is_causal=True), transposed, pairs, head_dim, 5
                ))  # fmt: skip

    for case, (batch, heads_q, heads_kv, length, head_dim, window) in CHOSEN.items():
        leaves = inputs(batch, heads_q, heads_kv, length, head_dim)
        bias = normal(batch, heads_kv, length)
        pairs = batch * heads_q * causal_pairs(length, window)

        def attend(q, k, v, bias, window=window):
            return flash_dmattn_func(
                q, k, v, attn_bias=bias, is_causal=True, keep_window_size=window
            )

        add(case, "ours", **timed(attend, [*leaves, bias], pairs, head_dim))

    length, window = 32768, 2048
    leaves = inputs(1, 16, 8, length, 128)
    intervals = sliding_window(length, window, device="cuda")
    add(f"sliding B1 H16 Hkv8 N{length} D128 w{window}", "ours", **timed(
        lambda q, k, v: flash_dmattn_func(q, k, v, key_intervals=intervals), leaves,
        16 * causal_pairs(length, window), 128,
    ))  # fmt: skip

    for case, (batch, heads_q, heads_kv, length, head_dim, window) in PAIRS.items():
        leaves = inputs(batch, heads_q, heads_kv, length, head_dim)
        bias = normal(batch, heads_kv, length, length)
        # Random keys, so that no tile is empty: about `window` of those a query may see.
        seen = torch.arange(1, length + 1, device="cuda")[:, None]
        mask = torch.empty(batch, heads_kv, length, length, dtype=torch.bool, device="cuda")
        for of_head in mask.flatten(0, 1):
            of_head.copy_((torch.rand(length, length, device="cuda") * seen < window).tril())
        pairs = int(mask.sum()) * heads_q // heads_kv

        def attend(q, k, v, bias, mask=mask):
            return flash_dmattn_func(q, k, v, attn_mask=mask, attn_bias=bias, is_causal=True)

        add(case, "ours", **timed(attend, [*leaves, bias], pairs, head_dim, 5))
        del leaves, bias, mask

    for length in (32768, 524288):
        scores = torch.randn(1, 8, length, device="cuda")
        for selection in ("per_query", "global"):
            choose = lambda s=selection: select_key_intervals(scores, 2048, selection=s)  # noqa: E731
            add(
                f"selection {selection} 8 rows N{length} w2048",
                "ours",
                ms=round(median_ms(choose), 4),
            )
    return results


# ---- Memory ------------------------------------------------------------------------------------------


def peak_of(body):
    """Peak bytes that `body` allocates on top of what was there."""
    body()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    body()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def mask_scenarios():
    """Peak of forward and backward with a mask and a choice, beyond that of plain causal attention."""
    batch, heads, length, head_dim, window = 2, 32, 4096, 128, 2048
    q, k, v = inputs(batch, heads, heads, length, head_dim)
    bias = normal(batch, heads, length)
    dout = torch.randn_like(q)
    masks = {
        "None + 3-d": None,
        "3-d + 3-d": torch.rand(batch, heads, length, device="cuda") < 0.9,
        "4-d + 3-d": torch.ones(batch, 1, length, length, dtype=torch.bool, device="cuda").tril(),
    }

    def plain():
        out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True)
        torch.autograd.grad(out, (q, k, v, bias), dout)

    base = peak_of(plain)
    results = [{"scenario": "causal, bias, no choice", "peak_mb": round(base / 1e6, 3)}]
    for name, mask in masks.items():

        def scenario(mask=mask):
            out = _flash_dynamic_mask_attention_forward(
                q, k, v, mask, bias, length, length, is_causal=True, keep_window_size=window
            )
            torch.autograd.grad(out, (q, k, v, bias), dout)

        peak = peak_of(scenario)
        results.append(
            {"scenario": name, "peak_mb": round(peak / 1e6, 3), "extra_mb": round((peak - base) / 1e6, 3)}
        )  # fmt: skip
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
        for layer in model.model.layers:  # else all scores tie, and eager keeps any of them
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


PARTS = {"speed": speed, "memory": memory, "training": training}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm"
    clocks = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True
    )
    record = {
        "what": "the CUDA backend through PyTorch, bf16",
        "machine": torch.cuda.get_device_name(),
        "name, driver, SM and memory clock now, highest SM clock": clocks.stdout.strip(),
        "commit": options.commit,
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
        "method": "medians of CUDA events per call, selection and plan included, L2 not flushed, launches ahead",
    }
    for name in options.parts:
        record[name] = PARTS[name]()
        options.record.write_text(json.dumps(record, indent=1) + "\n")


main()
