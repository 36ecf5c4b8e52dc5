"""Runs flash-linear-attention's own tests of attention, sinks and forgetting attention with our functions (`make test-peers`).

Its distributions have no tests, so FLASH_LINEAR_ATTENTION is the absolute path of a checkout (bc3b101d was tested). Its formulas,
bounds and comparison are used as they are there. Its kernels are not imported.
"""

import importlib.util
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import flash_dmattn

if "FLASH_LINEAR_ATTENTION" not in os.environ:
    pytest.skip("FLASH_LINEAR_ATTENTION names no checkout of it", allow_module_level=True)
CHECKOUT = Path(os.environ["FLASH_LINEAR_ATTENTION"])


def attend(q, k, v, g=None, sink_bias=None, window_size=None, scale=None, cu_seqlens=None):
    scale = scale or q.shape[-1] ** -0.5
    if g is not None and sink_bias is None:
        options = {"scale": scale, "window_size": window_size, "cu_seqlens": cu_seqlens}
        return flash_dmattn.forgetting_attention(q, k, v, g, **options)
    options = {"scale": scale, "is_causal": window_size is None}
    if window_size is not None:
        offsets = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        options["key_intervals"] = flash_dmattn.sliding_window(k.shape[1], window_size, device=q.device, query_length=q.shape[1], **offsets)  # fmt: skip
    elif cu_seqlens is not None:
        return flash_dmattn.flash_dmattn_varlen_func(q[0], k[0], v[0], cu_seqlens, cu_seqlens, sink_logits=sink_bias, **options)[None]  # fmt: skip
    if g is None:
        return flash_dmattn.flash_dmattn_func(q, k, v, sink_logits=sink_bias, **options)
    # A sink beside gates: the share of the keys in a softmax that the sink joins.
    gates = g.float().cumsum(1).transpose(1, 2)
    out, lse = flash_dmattn.flash_dmattn_func(q, k, v, attn_bias=-gates, return_lse=True, **options)
    share = torch.sigmoid(lse + gates - sink_bias[:, None]).transpose(1, 2)[..., None]
    return (out * share).to(q.dtype)


def attend_with_last_query(q, k, v, g=None, sink_bias=None, scale=None, cu_seqlens=None, do_gate_scale=False):  # fmt: skip
    """Each sequence of k and v has one query, which sees all of it."""
    scale, options, outs = scale or q.shape[-1] ** -0.5, {"sink_logits": sink_bias}, []
    for i, (begin, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        bias = None
        if g is not None:
            gates = g[:, begin:end].float() * (scale if do_gate_scale else 1)
            bias = (gates.sum(1, keepdim=True) - gates.cumsum(1)).transpose(1, 2)
        tensors = q[:, i : i + 1], k[:, begin:end], v[:, begin:end]
        outs.append(flash_dmattn.flash_dmattn_func(*tensors, None, bias, scale=scale, **options))
    return torch.cat(outs, 1)


STANDINS = {
    "fla": mock.Mock(__path__=[str(CHECKOUT / "fla")], __spec__=None, __version__=""),
    "fla.ops": mock.Mock(__path__=[str(CHECKOUT / "fla/ops")], __spec__=None),
    "fla.ops.attn.parallel": mock.Mock(parallel_attn=attend),
    "fla.ops.attn.decoding": mock.Mock(attn_decoding_one_step=attend_with_last_query),
    "fla.ops.forgetting_attn.parallel": mock.Mock(parallel_forgetting_attn=attend),
}
DIFFERS = {
    "test_parallel_bwd_full_value_reduction": "changes their kernels",
    "test_attn_decoding_value_split_matches_reference": "has a value of 320 columns, more than 256",
}
with mock.patch.dict(sys.modules, STANDINS):
    import fla.utils

    fla.utils.check_shared_mem = lambda *names: True
    fla.utils.device = "cuda" if torch.cuda.is_available() else "cpu"
    for file in ("attn", "attn_sink", "forgetting_attn"):
        spec = importlib.util.spec_from_file_location(file, CHECKOUT / f"tests/ops/test_{file}.py")
        theirs = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(theirs)
        for name in [name for name in vars(theirs) if name.startswith("test_")]:
            skip = pytest.mark.skipif(name in DIFFERS, reason=DIFFERS.get(name, ""))
            globals()[f"test_{file}_{name[5:]}"] = skip(vars(theirs)[name])
