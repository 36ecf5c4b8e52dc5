"""Makes one call of each kind to the CUDA backend, with inputs and gradients."""

from functools import partial

import torch

from flash_dmattn import (
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    packed_documents,
    sliding_window,
)


def leaves(seqlen=300, heads=(4, 2), head_dim=64, dtype=torch.bfloat16, device="cuda", batch=2):
    heads_q, heads_kv = heads
    shapes = [(batch, seqlen, h, head_dim) for h in (heads_q, heads_kv, heads_kv)]
    tensors = [
        torch.randn(s, dtype=dtype, device=device) for s in (*shapes, (batch, heads_kv, seqlen))
    ]
    return [t.requires_grad_() for t in tensors]


def attend(q, k, v, bias, **options):
    return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, **options)


def gradients(function, inputs):
    copies = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*copies)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out.float() * weight).sum().backward()
    return [out.detach(), *(t.grad for t in copies)]


def assert_close(actual, expected, where=""):
    """Allows rounding to 16 bits, because the order in which gradients are added changes from run to run."""
    for i, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        largest = wanted.abs().max().item()
        torch.testing.assert_close(
            got,
            wanted,
            rtol=2e-2,
            atol=min(2e-2, 4e-3 * largest),
            msg=lambda text, i=i: f"{where} tensor {i}: {text}",
        )


FUNCTIONS = {
    "causal": attend,
    "per_query": lambda *t: attend(*t, keep_window_size=50),
    "global": lambda *t: attend(*t, keep_window_size=50, selection="global", softcap=3.0),
    "padding": lambda q, k, v, b: flash_dmattn_func(
        q, k, v, torch.arange(q.shape[1], device=q.device)[None] >= 30, b, keep_window_size=90
    ),
    "own_intervals": lambda q, k, v, b: flash_dmattn_func(
        q, k, v, attn_bias=b, key_intervals=sliding_window(q.shape[1], 70, device=q.device)
    ),
}  # fmt: skip


def gradients_behind_other_work(inputs, stream):
    """Returns results and gradients of a call on `stream`, whose inputs are ready only after earlier work of the stream."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        busy = torch.randn(4096, 4096, device=stream.device)
        for _ in range(20):
            busy = busy @ busy
            busy = busy / busy.norm()
        scaled = [(t.detach() + 0 * busy[0, 0]).to(t.dtype) for t in inputs]
        results = gradients(FUNCTIONS["per_query"], scaled)
    stream.synchronize()
    return results


def attend_varlen(q, k, v, bias, offsets, **options):
    """Attends to packed sequences, none longer than LONGEST. q, k, v [1, S, H, D], bias [1, H, S]."""
    return flash_dmattn_varlen_func(
        q[0], k[0], v[0], offsets, offsets, LONGEST, LONGEST, attn_bias=bias[0].t(), is_causal=True,
        **options,
    )[None]  # fmt: skip


def attend_documents(q, k, v, bias, offsets):
    length = q.shape[1]
    documents = packed_documents(
        offsets, key_length=length, query_length=length, max_seqlen_k=LONGEST
    )
    return flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=documents)


# The longest document, an argument of the call, because the values of the offsets are on the device.
LONGEST = 200
OFFSETS = [[0, 40, 40, 240, 300], [0, 200, 210, 250, 300], [0, 1, 150, 300, 300]]
PACKED = {
    "varlen": attend_varlen,
    "varlen_per_query": partial(attend_varlen, keep_window_size=50),
    "varlen_global": partial(attend_varlen, keep_window_size=50, selection="global"),
    "packed_documents": attend_documents,
}
