"""The common body of the public functions: arguments in normal form, the selection of keys, a backend."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ._backends import cpp
from ._core import finite
from ._core.checks import (
    add_query_dimension,
    attention_arguments,
    bias_of_keys,
    check_bias_delay,
    check_scores_have_rule,
    clamp_count,
    resolve_flag,
    squeeze_query_dimension,
)
from ._core.gradients import expand_for_uses, repeat_interleave
from ._core.numerics import Numerics
from .keys.intervals import check_intervals, intersect, split_by_age
from .keys.patterns import causal_intervals, prefix_lm
from .keys.recognise import Memo
from .keys.rule import SelectionRule
from .keys.select import select_visible
from .keys.visible import Visible, repeat_heads
from .merge import add_sink, check_sink_logits, merge_sets

IN_PYTHON = ("triton", "flex")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    visible: Visible,
    numerics: Numerics,
    *,
    rule: SelectionRule | None = None,
    scores: Tensor | None = None,
    backend: str | None = None,
    memo: Memo | None = None,
    bias_delay: int = 0,
    own_row: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention for the arguments of the public functions. Returns out and the statistics.

    rule: in normal form; None: queries see all visible keys.
    scores: the argument selection_scores; None: the rule selects by the bias.
    backend: None: the first one that supports the problem.
    memo: results that the layers of one forward share, or None.
    own_row: as in split_by_age.
    """
    given, given_scores, mask, intervals = query, scores, visible.mask, visible.intervals
    query, key, value, bias, mask, scores, backend = attention_arguments(
        query, key, value, bias, mask, scores, numerics.saturate, backend
    )
    if query is not given:  # perhaps padded to the head dimension of value, which leaves the scale
        numerics = numerics.with_scale_for(given.shape[3])
    if intervals is not None:
        check_intervals(intervals, query, key)
    if mask is not None:
        visible = visible._replace(mask=mask)
    check_bias_delay(bias_delay, bias)
    if rule is not None:
        if bias is not None and bias.dim() == 4:
            bias = squeeze_query_dimension(bias)
        by_operator = backend not in IN_PYTHON
        visible = select_visible(
            rule, scores, query, key, bias, visible, by_operator, memo, bias_delay
        )
    elif scores is not None:
        check_scores_have_rule(given_scores, rule)
    return run_backend(query, key, value, bias, visible, numerics, backend, bias_delay, own_row)


def run_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    visible: Visible,
    numerics: Numerics,
    backend: str = "",
    bias_delay: int = 0,
    own_row: Tensor | None = None,
    held_keys: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention for arguments in normal form. Returns out and the statistics.

    bias_delay: the bias of a key, one value, is added for queries at least that many positions after it.
    own_row: as in split_by_age, where a key's position is not its index.
    backend: as `check_device` returns it.
    held_keys: returns which slots of a cache hold a key, bool [B, Hkv or 1, Sk]. Check mode reads only these.

    statistics: [.., B, Hq, Sq]. statistics[0] is lse. Callers index it only if they need lse, because a view takes as
    long as an allocation.
    """
    if not finite.is_enabled():
        return _run_unchecked_backend(
            query, key, value, bias, visible, numerics, backend, bias_delay, own_row
        )
    held = None if held_keys is None else held_keys()
    query, key, value, bias = finite.check_inputs(held, q=query, k=key, v=value, bias=bias)
    out, statistics = _run_unchecked_backend(
        query, key, value, bias, visible, numerics, backend, bias_delay, own_row
    )
    finite.check_outputs(out, statistics)
    return out, statistics


def _run_unchecked_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    visible: Visible,
    numerics: Numerics,
    backend: str,
    bias_delay: int = 0,
    own_row: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    if bias_delay:
        bias, bias_delay = bias_of_keys(bias, bias_delay), clamp_count(bias_delay)
        # The library's kernels count positions by the index of a key.
        if own_row is not None or backend in IN_PYTHON:
            return _run_by_age(
                query, key, value, bias, visible, numerics, backend, bias_delay, own_row
            )
    if numerics.scale is None:
        numerics = numerics.with_scale_for(query.shape[3])
    keys = visible.intervals
    heads = 1 if keys is None else keys.intervals.shape[1]
    if not (heads == 1 or heads == key.shape[2]):  # `in` may be False for a symbol of compiled code
        # Every query head has its own selection, so each gets its own key head.
        saturate = numerics.saturate
        mask, bias = (repeat_heads(t, query, key, saturate) for t in (visible.mask, bias))
        visible = visible._replace(mask=mask)
        group = query.shape[2] // key.shape[2]
        key, value = (repeat_interleave(t, group, 2, saturate) for t in (key, value))
    if backend in IN_PYTHON:
        return _run_in_python(query, key, value, bias, visible, numerics, backend)
    return cpp.attention(query, key, value, bias, visible, numerics, backend, bias_delay)


def _run_by_age(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    visible: Visible,
    numerics: Numerics,
    backend: str,
    bias_delay: int,
    own_row: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Splits the call into recent keys without a bias and older keys with their bias. The sets are disjoint, so each
    element is computed once."""
    keys = visible.intervals
    if keys is None:
        length = key.shape[1]
        prefix = 0 if visible.is_causal else length
        keys = prefix_lm(length, prefix, query_length=query.shape[1], device=key.device)
    elif visible.is_causal:
        keys = intersect(keys, causal_intervals(query, key))
    twice = (expand_for_uses(t, 2, numerics.saturate) for t in (query, key, value))
    parts = []
    for qkv, part_bias, part in zip(
        zip(*twice, strict=True), (None, bias), split_by_age(keys, bias_delay, own_row), strict=True
    ):
        part_visible = Visible(visible.mask, False, part)
        parts.append(_run_unchecked_backend(*qkv, part_bias, part_visible, numerics, backend))
    if any(statistics is None for _, statistics in parts):
        raise NotImplementedError(
            "bias_delay: got backend='flex' on the CPU, where FlexAttention returns no log-sum-exp; expected another backend"
        )
    outs, lses = zip(*((out, s[0]) for out, s in parts), strict=True)
    out, lse = merge_sets(outs, lses, numerics.saturate)
    return out, lse.unsqueeze(0)


def with_lse(
    out: Tensor,
    statistics: Tensor | None,
    return_lse: bool,
    return_attn_probs: bool | None = None,
    sink_logits: Tensor | None = None,
    saturate: bool = True,
) -> Tensor | tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, None]:
    """Returns what the public functions return: out, (out, lse), or (out, lse, None) as in 1.x.

    statistics: [.., B, Hq, Sq], the first of which is lse.
    """
    if return_lse is False and return_attn_probs is None and sink_logits is None:
        return out
    lse = statistics if statistics is None else statistics[0]
    if sink_logits is not None:
        if lse is None:
            raise NotImplementedError(
                "sink_logits: got backend='flex' on the CPU, where FlexAttention returns no log-sum-exp; expected another backend"
            )
        check_sink_logits(sink_logits, out)
        is_checked = finite.is_enabled()
        if is_checked:
            (sink_logits,) = finite.check_inputs(sink_logits=sink_logits)
        out, lse = add_sink(out, lse, sink_logits, saturate)
        if is_checked:
            finite.check_outputs(out, None)
    with_probabilities = resolve_flag(return_attn_probs, "return_attn_probs")
    if not resolve_flag(return_lse, "return_lse"):
        if not with_probabilities:
            return out
    elif with_probabilities:
        raise ValueError(
            "return_lse, return_attn_probs: got True for both, expected one of them (2 and 3 results)"
        )
    return (out, lse, None) if with_probabilities else (out, lse)


def _run_in_python(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    visible: Visible,
    numerics: Numerics,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    bias = bias if bias is None else add_query_dimension(bias)
    if backend == "triton":
        # The module imports triton, which may be missing.
        from ._backends.triton.ops import attention as implementation
    else:
        from ._backends.flex import attention as implementation
    return implementation(query, key, value, bias, visible, numerics)
