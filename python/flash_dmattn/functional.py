"""Dynamic mask attention on torch tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import Unpack

from ._core.availability import check_backend_runs, get_available_backends
from ._core.checks import (
    attention_inputs,
    bias_argument,
    check_bias_delay,
    check_count,
    check_scores_have_rule,
    check_tensor,
    refuse_transforms,
    resolve_backend,
    resolve_flag,
    selection_scores_argument,
)
from ._core.foreign_arguments import check_names, refuses_foreign_arguments
from ._core.gradients import expand
from ._core.numerics import Numerics
from ._dispatch import (
    IN_PYTHON,
    attention,
    run_backend,
    with_lse,
)
from .keys.intervals import KeyIntervals
from .keys.patterns import packed_documents
from .keys.positions import KeyPositions, check_offsets
from .keys.rule import RuleParts, SelectionRule, takes_rule
from .keys.select import scores_and_mask, select_at, with_common_heads
from .keys.visible import Visible


@refuses_foreign_arguments
@takes_rule
def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    *,
    scale: float | None = None,
    keep_window_size: int | Sequence[int] | None = None,
    selection_scores: Tensor | None = None,
    bias_delay: int = 0,
    sink_logits: Tensor | None = None,
    key_intervals: KeyIntervals | None = None,
    nonfinite: str = "saturate",
    return_lse: bool = False,
    backend: str | None = None,
    **rule: Unpack[RuleParts],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]:
    """Computes exact softmax attention over the visible keys, with an optional additive bias.

    query: [B, Sq, Hq, D]; key: [B, Sk, Hkv, D]; value: [B, Sk, Hkv, Dv]. Hq is a multiple of Hkv; D and Dv are from 1 to 256.
        The layout is [B, S, H, D], not torch's [B, H, S, D]; if S = H a wrong layout is not detected. bfloat16, float16 or
        float32, on the CPU float64 too (through the slow reference backend); any strides. On a GPU, float32
        runs on the Triton kernels, and raises without Triton. torch.backends.cuda.matmul.allow_tf32 permits tf32 products.

    Visible keys:

    attn_mask: bool, True where visible: [B, Sk] (padding), [B, H, Sk] (the same for every query) or
        [B, H, Sq, Sk]; H is Hq, Hkv or 1, every dimension may be 1. Two dimensions are always padding: write a mask of
        elements [Sq, Sk] as mask[None, None].
    is_causal: query i sees keys up to i + Sk - Sq. False by default, unlike in select_key_intervals.
    key_intervals: the query rows to which each key is visible. A mask, if given, hides further elements.
    keep_window_size, rule: a KeyRule: above all the number of keys that a query keeps by their scores. A row is one document
        unless key_intervals separate documents. Query i is at position i + Sk - Sq: use flash_dmattn_varlen_func for packed
        documents with fewer queries than keys.
    selection_scores: the scores by which keep_window_size selects, one value per key: [B, H, Sk] or
        [B, H, 1, Sk]. By default the bias, which then must have one of these shapes. The selection has no
        gradient. If H = Hq > Hkv, each query head has its own selection. Key and value are then repeated for the query
        heads, unless the selection becomes a mask.

    Scores of attention:

    attn_bias: added to the scaled scores; shapes as attn_mask; dtype of query or float32. A value at or below the
        mask value of the bias's own dtype hides its element: -1e4 in float16, -1e30 in other dtypes. The gradient has the
        shape of the bias. Use float32 if the bias selects keys: in 16 bits many scores are equal, and rounding decides.
    bias_delay: the bias of a key is added only for queries at least this many positions after the key. The bias must have
        one value per key. The selection by keep_window_size uses the bias without a delay.
    scale: the factor on query . key, 1 / sqrt(D) by default; 0 raises. Scaled scores are clamped to the range of float32,
        which a scale of 1e38 reaches.
    softcap: c > 0 replaces a scaled score s by c * tanh(s / c).
    sink_logits: [Hq], one learnable logit per head. It enters every softmax like the score of a key whose value is 0.

    Numerics, results and backends:

    deterministic: whether gradients are bit-identical from run to run. None: as torch.use_deterministic_algorithms sets.
        On the CPU they always are.
    nonfinite: "saturate": gradients are always finite; "propagate": inf and NaN stay visible, as GradScaler
        needs them.
    return_lse: also return the log-sum-exp of the scores, float32 and differentiable (see merge_attention).
    backend: the name of a backend (see get_available_backends). None: the first that supports the problem.

    Names of 1.x:

    softmax_scale, return_attn_probs: scale and return_lse. With return_attn_probs the call returns (out, lse, None).
        softmax_scale and is_causal are the sixth and seventh positional arguments; triton_dmattn_func and flex_dmattn_func
        have them in the opposite order.

    Returns out [B, Sq, Hq, Dv], or (out, lse [B, Hq, Sq]) with return_lse. A query that sees no key has out = 0 and
    lse = -inf.
    """
    numerics = Numerics.from_arguments(scale, softmax_scale, softcap, nonfinite, deterministic)
    rule = SelectionRule.from_arguments(keep_window_size, rule)
    out, statistics = attention(
        query,
        key,
        value,
        attn_bias,
        Visible(attn_mask, resolve_flag(is_causal, "is_causal"), key_intervals),
        numerics,
        rule=rule,
        scores=selection_scores,
        backend=backend,
        bias_delay=bias_delay,
    )
    return with_lse(out, statistics, return_lse, return_attn_probs, sink_logits, numerics.saturate)


@refuses_foreign_arguments
@takes_rule
def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    block_table: Tensor | None = None,
    *,
    scale: float | None = None,
    attn_bias: Tensor | None = None,
    keep_window_size: int | Sequence[int] | None = None,
    selection_scores: Tensor | None = None,
    bias_delay: int = 0,
    sink_logits: Tensor | None = None,
    nonfinite: str = "saturate",
    return_lse: bool = False,
    backend: str | None = None,
    **rule: Unpack[RuleParts],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]:
    """Computes flash_dmattn_func for sequences of different lengths that are packed one after the other.

    query: [total_q, Hq, D]; key: [total_k, Hkv, D]; value: [total_k, Hkv, Dv].
    cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], where each sequence begins in the packed dimension,
        and the total at the end; tokens past it are padding, whose out is 0. Sequence lengths may differ between
        query and key and may be 0; causality is aligned to the bottom right corner of each sequence.
    max_seqlen_q, max_seqlen_k: the lengths of the longest sequences. If cu_seqlens_q is cu_seqlens_k and there is no
        keep_window_size, max_seqlen_k saves a synchronisation on a GPU. If it is too small, keys are lost.
    attn_bias: [total_k, H], one value per key, added to its scores; H is Hq, Hkv or 1.
    keep_window_size, rule: a KeyRule, which applies within each sequence.
    selection_scores: [total_k, H], the scores by which keep_window_size selects; by default attn_bias.
    bias_delay, sink_logits: as in flash_dmattn_func.
    block_table: not supported.
    is_causal, softmax_scale, scale, softcap, deterministic, nonfinite, return_lse, return_attn_probs, backend: as in
        flash_dmattn_func.

    Returns out [total_q, Hq, Dv], or (out, lse [Hq, total_q]) with return_lse.
    """
    if block_table is not None:
        raise ValueError(
            "block_table: got a paged key cache, expected None; gather the pages into packed keys and values"
        )
    numerics = Numerics.from_arguments(scale, softmax_scale, softcap, nonfinite, deterministic)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if length is not None:
            check_count(length, name)
    is_causal = resolve_flag(is_causal, "is_causal")
    check_bias_delay(bias_delay, attn_bias)
    *inputs, backend = attention_inputs(query, key, value, "total, H, D", backend)
    numerics = numerics.with_scale_for(query.shape[2])
    query, key, value = inputs
    total_q, total_k = query.shape[0], key.shape[0]
    same_offsets = cu_seqlens_q is cu_seqlens_k
    cu_seqlens_q = check_offsets(cu_seqlens_q, "cu_seqlens_q", total_q).to(torch.int32).contiguous()
    check_offsets(cu_seqlens_k, "cu_seqlens_k", total_k, longest=max_seqlen_k)
    cu_seqlens_k = cu_seqlens_k.to(torch.int32).contiguous()
    if same_offsets:
        cu_seqlens_q = cu_seqlens_k
    offsets = {"cu_seqlens_k": cu_seqlens_k, "cu_seqlens_q": cu_seqlens_q}
    refuse_transforms(
        query=query, key=key, value=value, attn_bias=attn_bias, selection_scores=selection_scores
    )
    query, key, value = query[None], key[None], value[None]
    saturate = numerics.saturate
    bias = _unpack_per_key(attn_bias, query, key, "attn_bias", saturate)
    if bias is not None:
        bias = bias_argument(bias, query, key, saturate)
    rule = SelectionRule.from_arguments(keep_window_size, rule)
    scores = _unpack_per_key(selection_scores, query, key, "selection_scores")
    if scores is not None:
        scores = selection_scores_argument(scores, query, key)
    check_scores_have_rule(scores, rule)
    intervals = _packed_intervals(
        rule, scores, query, key, bias, is_causal, offsets, max_seqlen_k, bias_delay
    )
    own_row = None
    if bias_delay and not same_offsets:
        own_row = KeyPositions.from_arguments(total_k, total_q, **offsets).own_row
    visible = Visible(intervals=intervals)
    out, statistics = run_backend(
        query, key, value, bias, visible, numerics, backend, bias_delay, own_row
    )
    if statistics is not None:
        statistics = statistics[:, 0]
    return with_lse(out[0], statistics, return_lse, return_attn_probs, sink_logits, saturate)


def _packed_intervals(
    rule: SelectionRule | None,
    own_scores: Tensor | None,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    offsets: dict[str, Tensor],
    max_seqlen_k: int | None,
    bias_delay: int,
) -> KeyIntervals:
    """Returns the intervals of packed sequences. query: [1, total_q, Hq, D]; key: [1, total_k, Hkv, D].

    offsets: cu_seqlens_k and cu_seqlens_q, by name.
    """
    total_q, total_k = query.shape[1], key.shape[1]
    if rule is not None:
        rule.check_heads(key.shape[2])
        if rule.reads_scores() and bias is None and own_scores is None:
            raise ValueError(
                "keep_window_size: got no scores, expected one score per key in attn_bias or selection_scores: [total_k, H] "
                f"with total_k = {total_k}"
            )
        scores, mask = scores_and_mask(rule, own_scores, query, key, bias, None)
        if own_scores is not None or bias_delay or not rule.has_room_for(total_k):
            key_mask = None if mask is None else mask[:, :, 0]
            rule.check_causality(is_causal)
            rule, scores, key_mask = with_common_heads(rule, query, key, scores, key_mask)
            keys = KeyPositions.from_arguments(
                total_k, total_q, **offsets, key_mask=key_mask, device=scores.device
            )
            return select_at(keys, scores, rule, is_causal)
    return packed_documents(
        **offsets,
        is_causal=is_causal,
        key_length=total_k,
        query_length=total_q,
        max_seqlen_k=max_seqlen_k,
    )


def _unpack_per_key(
    values: Tensor | None, query: Tensor, key: Tensor, name: str, saturate: bool = True
) -> Tensor | None:
    """Transposes [total_k, H] to [1, H, total_k]."""
    if values is None:
        return None
    check_tensor(values, name)
    total_k, heads = key.shape[1], (query.shape[2], key.shape[2], 1)
    shape = tuple(values.shape)
    if len(shape) != 2 or shape[0] not in (total_k, 1) or shape[1] not in heads:
        raise ValueError(
            f"{name}: got shape {shape}, expected [total_k, H] with total_k = {total_k} and H = {heads[0]}, {heads[1]} or 1"
        )
    return expand(values, (total_k, shape[1]), saturate).t()[None]


def flash_dmattn_func_auto(backend: str | None = None, **options) -> Callable:
    """Returns the attention function of a backend (see get_available_backends). None: the first available one of cuda,
    triton, flex and cpu.

    Keyword arguments become defaults of the function. Raises RuntimeError with the reason if the backend cannot
    run, and TypeError for an argument that the function does not have.
    """
    check_names(options, "flash_dmattn_func_auto")
    unknown = sorted(options.keys() - inspect.signature(flash_dmattn_func).parameters.keys())
    if unknown:
        raise TypeError(
            f"flash_dmattn_func_auto: got {', '.join(map(repr, unknown))}, expected arguments of flash_dmattn_func"
        )
    backend = resolve_backend(backend)
    if not backend and get_available_backends()[0] in IN_PYTHON:
        backend = get_available_backends()[0]  # a GPU without kernels of the library
    if not backend:
        return partial(flash_dmattn_func, **options) if options else flash_dmattn_func
    check_backend_runs(backend)
    return partial(flash_dmattn_func, backend=backend, **options)


def _with_options_of_general_function(function: Callable) -> Callable:
    """Gives a function, whose `options` are those of flash_dmattn_func, a signature with their names, and refuses others."""
    name, own = function.__name__, dict(inspect.signature(function).parameters)
    del own["options"]
    general = inspect.signature(flash_dmattn_func)
    others = general.parameters.keys() - own.keys() - {"backend"}
    parameters = [
        *own.values(),
        *(p.replace(kind=p.KEYWORD_ONLY) for p in general.parameters.values() if p.name in others),
    ]

    @functools.wraps(function)
    def call(*arguments, **options):
        check_names(options, name)
        for option in options:
            if option not in own and option not in others:
                raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")
        return function(*arguments, **options)

    call.__signature__ = general.replace(parameters=parameters)
    return call


@_with_options_of_general_function
def triton_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool | None = None,
    softmax_scale: float | None = None,
    **options,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]:
    """Computes flash_dmattn_func with Triton kernels, on GPUs of any vendor. Arguments as in flash_dmattn_func, except:

    is_causal, softmax_scale: the sixth and seventh positional arguments, as in 1.x; flash_dmattn_func has them in the
        opposite order. All others are passed by name.
    query, key, value: float32, bfloat16 or float16, head dimension 1 to 256, on a GPU; on the CPU with
        TRITON_INTERPRET=1, which is for tests, and multiplies bfloat16 wrongly.
    deterministic: without effect; gradients are always bit-identical from run to run.

    Raises RuntimeError with the reason if it cannot run.
    """
    return flash_dmattn_func(
        query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, backend="triton", **options
    )  # fmt: skip


@_with_options_of_general_function
def flex_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool | None = None,
    softmax_scale: float | None = None,
    **options,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]:
    """Computes flash_dmattn_func with torch's FlexAttention, which compiles for each new shape.

    Arguments as in flash_dmattn_func, except:

    is_causal, softmax_scale: the sixth and seventh positional arguments, as in 1.x; flash_dmattn_func has them in the
        opposite order. All others are passed by name.

    It skips empty blocks of 128 x 128, so with scattered keys it does the work of dense attention. Numbers
    beyond fp32 inside a score are not handled: finite inputs as large as the dtype allows can give NaN.
    Inf and NaN saturate: scores at ±1e38, v at the largest number of its dtype (docs/numerics.md). Inf and NaN of
    invisible keys have no effect. nonfinite="propagate" raises NotImplementedError, because torch's kernels spread 0 * NaN.
    Sequences must not be empty. On the CPU torch provides no backward and no log-sum-exp, so lse is None.
    """
    return flash_dmattn_func(
        query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, backend="flex", **options
    )  # fmt: skip
