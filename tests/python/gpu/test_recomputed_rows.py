"""Rows that overflow fp32 or see no key are recomputed by their own block, or after it if a block has many tiles."""

import pytest
import torch

from flash_dmattn import flash_dmattn_func

HEADS, LENGTH, HIDDEN_KEYS = 16, 2048, 70


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("form", ["dense", "padded", "softcap", "top_w"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_head_alone_equals_head_among_others(head_dim, form, strided):
    """16 heads have more tiles than a GPU has multiprocessors, one head has fewer."""
    # Rows of an odd number of elements cannot be copied 16 bytes at a time.
    shape = (1, LENGTH, HEADS, head_dim + (1 if strided else 0))
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)[..., :head_dim] for _ in range(3)
    )
    q[:, 5::97] *= 1e19
    k[:, ::3] *= 1e19
    options = {"softcap": {"softcap": 1e38}, "top_w": {"keep_window_size": 300}}.get(form, {})
    if form == "padded":
        options["attn_mask"] = torch.ones(1, LENGTH, dtype=torch.bool, device="cuda")
        options["attn_mask"][:, :HIDDEN_KEYS] = False
    if form == "top_w":
        options["attn_bias"] = torch.randn(1, 1, LENGTH, device="cuda")

    def attend(*heads):
        out, lse = flash_dmattn_func(*heads, is_causal=True, return_lse=True, **options)
        return out, lse

    out, lse = attend(q, k, v)
    alone = [attend(*(t[:, :, h : h + 1] for t in (q, k, v))) for h in range(HEADS)]
    assert out.isfinite().all() and (lse[:, :, 5::97] > 1e36).any()
    if form == "padded":
        assert (out[:, :HIDDEN_KEYS] == 0).all() and (lse[:, :, :HIDDEN_KEYS] == -torch.inf).all()
    assert torch.equal(out, torch.cat([o for o, _ in alone], 2))
    assert torch.equal(lse, torch.cat([s for _, s in alone], 1))
