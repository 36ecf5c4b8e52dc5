"""Compares the functions that transformers' models call on the GPU with the same calls on the CPU."""

import pytest
import torch

from flash_dmattn import sliding_window
from flash_dmattn.integrations.flash_dynamic_mask_attention import (
    flash_dynamic_mask_attention_forward,
)
from flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils import (
    _flash_dynamic_mask_attention_forward,
)

BATCH, LENGTH, HEADS_Q, HEADS_KV, HEAD_DIM, KEEP = 2, 150, 4, 2, 64, 20
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
MASKS = {
    "none": lambda: None,
    "2-d": lambda: torch.arange(LENGTH) >= torch.tensor([[0], [17]]),
    "3-d": lambda: torch.rand(BATCH, HEADS_KV, LENGTH) < 0.8,
    "causal": lambda: CAUSAL.expand(BATCH, 1, -1, -1),
    "additive": lambda: torch.where(CAUSAL, 0, torch.finfo(torch.bfloat16).min)[None, None].bfloat16(),
    "arbitrary": lambda: CAUSAL & (torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.7),
    "intervals": lambda: sliding_window(LENGTH, 60),
}  # fmt: skip


def run(device, dtype, states, mask, bias, dout):
    leaves = [t.to(device, dtype).requires_grad_() for t in (*states, bias)]
    mask = None if mask is None else mask.to(device)
    out = _flash_dynamic_mask_attention_forward(
        *leaves[:3], mask, leaves[3], LENGTH, LENGTH, is_causal=True, keep_window_size=KEEP
    )
    gradients = torch.autograd.grad(out, leaves, dout.to(device, dtype))
    return [t.float().cpu() for t in (out.detach(), *gradients)]


def make_states():
    return [
        torch.randn(BATCH, LENGTH, h, HEAD_DIM).bfloat16() for h in (HEADS_Q, HEADS_KV, HEADS_KV)
    ]


@pytest.mark.parametrize(
    "bias_shape", [(HEADS_KV, LENGTH), (HEADS_Q, LENGTH), (HEADS_KV, LENGTH, LENGTH)]
)
@pytest.mark.parametrize("mask", MASKS)
def test_masked_attention_equals_the_cpu(mask, bias_shape):
    states, bias = make_states(), torch.randn(BATCH, *bias_shape).bfloat16()
    arguments = (states, MASKS[mask](), bias, torch.randn_like(states[0]))
    exact = run("cpu", torch.float32, *arguments)
    on_cpu = run("cpu", torch.bfloat16, *arguments)
    on_gpu = run("cuda", torch.bfloat16, *arguments)
    # The GPU is as near to float32 as the CPU except for the order of roundings. With 128 queries per tile, P in dS is rounded to
    # bf16, as in FlashAttention, and the CPU rounds later.
    for wanted, cpu, gpu in zip(exact, on_cpu, on_gpu, strict=True):
        assert torch.dist(gpu, wanted) <= 2.5 * torch.dist(cpu, wanted)


class Layer(torch.nn.Linear):
    is_causal = True
    keep_window_size = KEEP


def test_attention_function_casts_float32_to_weight_dtype():
    """Inputs [B, H, S, D] in float32, as PEFT leaves them, are cast to the dtype of the layer's weights."""
    states, bias = make_states(), torch.randn(BATCH, HEADS_KV, LENGTH).bfloat16()
    results = []
    for device in ("cuda", "cpu"):
        layer = Layer(8, 8, dtype=torch.bfloat16, device=device)
        wide = [t.transpose(1, 2).float().to(device) for t in states]
        out, weights = flash_dynamic_mask_attention_forward(layer, *wide, None, bias.to(device))
        assert weights is None and out.dtype == torch.bfloat16
        results.append(out.cpu())
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
