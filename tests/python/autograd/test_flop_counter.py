"""torch's FlopCounterMode counts the operations of our attention."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flash_dmattn import flash_dmattn_func, sliding_window

B, S, H, D = 2, 48, 4, 16


def counted(**options):
    q, k, v = (torch.randn(B, S, heads, D, requires_grad=True) for heads in (H, 2, 2))
    with FlopCounterMode(display=False) as counter:
        flash_dmattn_func(q, k, v, **options).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "options, keys",
    [
        ({}, S),
        ({"is_causal": True}, S),  # like torch's own attention
        ({"key_intervals": sliding_window(S, 7)}, 7 + 1),
        ({"attn_bias": torch.zeros(B, 2, S), "keep_window_size": 9, "is_causal": True}, 9 + 1),
    ],
)
def test_forward_counts_two_products_and_backward_five(options, keys):
    assert counted(**options) == (4 + 10) * B * H * S * keys * D
