"""Floating point operations of attention for torch.utils.flop_counter.FlopCounterMode.

Importing this module registers them. `import flash_dmattn` does so as soon as torch.utils.flop_counter is imported, before
it or after it, and does not import that module: it imports Triton, half a second.

Counted are the products of D elements for each visible element as far as shapes tell: all elements of the score
matrix, or those within the bound of key intervals, or those of a key list; two products forward, five backward.
Causality and masks, whose elements would have to be read, are not subtracted; torch does the same for its attention.
"""

from __future__ import annotations

from torch.utils.flop_counter import register_flop_formula

from . import _ops

ops = _ops.operators


def _elements(q, k, key_list, key_bound) -> int:
    """Of the score matrices of all heads."""
    batch, seqlen_q, heads_q, _ = q
    keys = k[1]
    if key_list is not None:
        keys = min(keys, key_list[2])
    elif key_bound and key_bound[0] >= 0:
        keys = min(keys, key_bound[0] + key_bound[1])
    return batch * heads_q * seqlen_q * keys


@register_flop_formula(ops.forward)
def forward_flops(
    q, k, v, mask, bias, intervals, key_list, count, rank, limit, key_bound, *options, **_
):
    return 4 * q[3] * _elements(q, k, key_list, key_bound)


@register_flop_formula(ops.select_and_attend)
def select_and_attend_flops(q, k, v, bias, window, is_causal, *options, **_):
    return 4 * q[3] * _elements(q, k, None, (window, int(is_causal)))


@register_flop_formula(ops.backward)
def backward_flops(dout, q, k, *others, **_):
    key_list, key_bound = others[4], others[10]
    return 10 * q[3] * _elements(q, k, key_list, key_bound)
