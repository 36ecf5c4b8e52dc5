"""Long sequences need O(N w) memory, measured in a separate process."""

from peak_memory import run_measured

LONG_SEQUENCE = """
import torch
from flash_dmattn import flash_dmattn_func

length, heads, head_dim, window = 65536, 2, 64, 512
q, k, v = (torch.randn(1, length, heads, head_dim, requires_grad=True) for _ in range(3))
bias = torch.randn(1, heads, length, requires_grad=True)
out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, keep_window_size=window)
out.sum().backward()
for tensor in (q.grad, k.grad, v.grad, bias.grad):
    assert tensor.isfinite().all()
print(peak())
"""


def test_forward_and_backward_of_65536_keys_stay_below_0_9_gigabytes():
    """The call takes 0.54 GB. One bit per (query, key) pair of one head would double that."""
    (peak,) = run_measured(LONG_SEQUENCE)
    assert peak < 0.9e9, f"{peak / 1e9:.2f} GB"
