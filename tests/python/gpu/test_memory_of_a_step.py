"""The memory that a step on the GPU allocates in addition to inputs, results, gradients and their fp32 sums."""

from functools import partial

import pytest
import torch

from flash_dmattn import flash_dmattn_func, triangle_attention
from flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils import (
    _flash_dynamic_mask_attention_forward,
)
from flash_dmattn.kernels import recorded_kernels
from harness.memory import bytes_of, peak_bytes
from triangle_cases import draw, gradients


def leaves_of(batch, heads_q, heads_kv, length, head_dim):
    shapes = [(batch, length, h, head_dim) for h in (heads_q, heads_kv, heads_kv)]
    return [
        torch.randn(s, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for s in (*shapes, (batch, heads_kv, length))
    ]


@pytest.mark.parametrize("mask_dims", [None, 3, 4])
def test_mask_backward_needs_no_quadratic_tensor(mask_dims):
    batch, heads, length, window = 2, 32, 4096, 2048
    q, k, v, bias = leaves = leaves_of(batch, heads, heads, length, 128)
    dout = torch.randn_like(q)
    mask = None
    if mask_dims == 3:
        mask = torch.rand(batch, heads, length, device="cuda") < 0.9
    elif mask_dims == 4:
        mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device="cuda").tril_()

    def step():
        out = _flash_dynamic_mask_attention_forward(
            q, k, v, mask, bias, length, length, is_causal=True, keep_window_size=window
        )
        return out, *torch.autograd.grad(out, leaves, dout)

    with recorded_kernels() as kernels:
        step()  # memory allocated at first use does not count
    peak, kept = peak_bytes(step, "cuda")
    rest = peak - bytes_of(kept) - 4 * bias.numel()
    bound, numbers = 2e6, 0
    if any(name.endswith("slots") for name in kernels):
        # A row has delta, three numbers of its query tile and one in 16 bits. A key has its interval, two queries and its bias, a
        # record of four numbers, and three of the schedule.
        numbers = 4.5 + 2 + 3 + 4 + 3
        # Sums of dk, dv and dbias of at most three parts of a block, for the keys of 128 slots that stay and that leave, and the
        # schedule's keys of the slots at 64 queries. Neither grows with the length.
        blocks = torch.cuda.get_device_properties(0).multi_processor_count
        rest -= 4 * 3 * blocks * 2 * 128 * (2 * 128 + 1) + 4 * batch * heads * 64 * window
    # The backward adds in fp32 to dk and dv, or where blocks own keys to dq.
    sums = 4 * (k.numel() + v.numel())
    rest -= 4 * q.numel() if rest < sums else sums
    # lse and what rounding took from it, as the forward saves them.
    numbers += 2
    if any(name.endswith("block_key_info") for name in kernels):
        # A row also has delta and two numbers of its query tile; a key has two queries and its bias.
        numbers += 3 + 3
    extra = rest - 4 * numbers * batch * heads * length
    if mask_dims == 4:
        lists = 4 * batch * heads * (length // 128) * (window + 128)
        packed_bits = batch * length * length // 8
        bound += lists + packed_bits
    assert -1e6 <= extra <= bound, f"{extra / 1e6:.2f} MB, expected at most {bound / 1e6:.2f}"


def test_long_sequence_needs_linear_memory():
    length, window = 131072, 2048
    leaves = leaves_of(1, 16, 8, length, 128)
    q, k, v, bias = leaves
    dout = torch.randn_like(q)

    def step():
        out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, keep_window_size=window)
        return out, *torch.autograd.grad(out, leaves, dout)

    step()
    peak, kept = peak_bytes(step, "cuda")
    needed_bytes = bytes_of([*leaves, dout, *kept]) + 4 * 16 * length  # and lse
    on_top = (peak + bytes_of([*leaves, dout])) / needed_bytes - 1
    assert on_top <= 0.45, f"{100 * on_top:.1f} % on top of inputs, results and gradients"


def test_triangle_attention_holds_gradients_of_a_part_of_rows():
    """The bias and its gradient have 8 MiB. An expanded bias, or gradients of all rows at the same time, would have 1 GiB."""
    inputs, mask = draw(1, 128, 1024, 1024, 4, 32, 32, torch.bfloat16, "cuda")
    direction = torch.randn_like(inputs[0])
    step = partial(gradients, triangle_attention, inputs, direction, mask)
    step()
    assert peak_bytes(step, "cuda")[0] < 768 * 2**20
