"""Exact attention over a sequence whose pieces are on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._core.checks import may_read
from .._dispatch import attention, with_lse
from ..keys.in_torch import find_sinks
from ..keys.intervals import KeyIntervals
from ..keys.rule import RuleParts, SelectionRule, takes_rule
from ..keys.visible import Visible
from ..scores import with_zero_sum_gradient
from ._exchange.arguments import AttendOptions, ExchangeArguments, ExchangeCall
from ._exchange.collectives import Collectives, Group, collectives_of
from ._exchange.earlier_keys import PrependEarlierKeys
from ._exchange.pieces import Boundary, shown_in_piece
from ._exchange.traced import select_in_piece


class ExchangedKeys(NamedTuple):
    """The result of `begin_exchange`: keys of earlier ranks, then those of this rank.

    `attend_to_pieces` and `boundary_state` take it. The first `places` rows are for keys of earlier ranks. The keys
    come first, in the order of their positions. The places that are left hold no key and have the position -1.
    """

    boundary: Boundary
    key: Tensor  # [B, places + n, Hkv, D]
    value: Tensor
    scores: Tensor  # float32 [B, Hkv, places + n]; a key whose score is NaN is never selected
    bias: Tensor | None  # float32 [B, Hkv, places + n]; None: no bias is added
    bias_is_score: bool
    positions: Tensor  # int32 [B, Hkv, places], positions in the whole sequence
    present: Tensor | None  # bool [B, 1 or Hkv, n]: which keys of this rank are present; None: all
    documents: Tensor | None  # int64 [B or 1, documents + 1]: offsets in the whole sequence
    # The CUDA stream that makes the tensors. None: the current stream has made them.
    stream: torch.cuda.Stream | None = None
    # The ranks of this group compare the options of `attend_to_pieces`. None: they did before the exchange, or the code is
    # compiled and cannot compare.
    collectives: Collectives | None = None
    check: bool | None = None  # the argument of `begin_exchange`


@takes_rule
def context_parallel_dmattn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    *,
    group: Group,
    keep_window_size: int | Sequence[int],
    attn_bias: str | Tensor | None = "scores",
    scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    nonfinite: str = "saturate",
    sink_logits: Tensor | None = None,
    bias_delay: int = 0,
    zero_sum: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    position_ids: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    headroom: bool = False,
    exchange: str = "auto",
    check: bool | None = None,
    **rule: Unpack[RuleParts],
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes causal flash_dmattn_func over a sequence that is cut into one piece for each rank, in the order of ranks.

    Returns this rank's rows of the result of `flash_dmattn_func` on the whole sequence. Queries see the same keys as in
    that call (ties included), and gradients are the same. A rank receives only the keys that the last query before its
    piece sees: at most keep_window_size for each key head, at any sequence length.

        out = context_parallel_dmattn(q, k, v, scores, group=mesh["cp"], keep_window_size=2048)

        # The whole sequence on one rank
        out = flash_dmattn_func(q, k, v, attn_bias=scores, is_causal=True, keep_window_size=2048)

    If ranks disagree on an argument that has to be the same, all ranks raise an error in a group's first call. In later
    calls they may deadlock, unless check=True.

    query: [B, n, Hq, D]; key, value: [B, n, Hkv, D]: the tokens of this rank. n may differ between ranks (see
        `lengths`) and may be 0.
    scores: [B, Hkv or 1, n], the scores by which keys are selected; float32 is best. They have a gradient only as a bias.
    group: a ProcessGroup, or a DeviceMesh of one dimension (mesh["cp"]).
    attn_bias: "scores" adds the scores as a bias; None adds no bias; a tensor [B, Hkv or 1, n] is another bias, which
        gets a gradient.
    zero_sum: makes the gradient of the bias sum to 0 over the keys of each head, as DynamicMaskAttention and Doge do.
        (Do not pass the scores through with_zero_sum_gradient yourself: it would sum over the keys of one piece.)
    scale, softcap, deterministic, nonfinite, sink_logits, bias_delay, return_lse, backend: as in flash_dmattn_func.
    keep_window_size, rule, key_mask, cu_seqlens, position_ids, lengths, headroom, exchange, check: as in `begin_exchange`.

    Every rank of the group has to make the same calls in the same order. Every rank has to run backward, too, so the
    loss of every rank has to depend on `out`.
    """
    call = ExchangeCall(
        key, value, scores, SelectionRule.of_keywords(keep_window_size, rule), attn_bias, key_mask, cu_seqlens, position_ids, lengths, headroom, exchange,
        nonfinite, check,
    )  # fmt: skip
    options = AttendOptions(
        scale, softcap, deterministic, sink_logits, bias_delay, zero_sum, return_lse, backend
    )
    return attend_with_options(query, begin_call(group, call, query, options), options)


@takes_rule
def begin_exchange(
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    *,
    group: Group,
    keep_window_size: int | Sequence[int],
    attn_bias: str | Tensor | None = "scores",
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    position_ids: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    headroom: bool = False,
    exchange: str = "auto",
    nonfinite: str = "saturate",
    check: bool | None = None,
    stream: torch.cuda.Stream | None = None,
    **rule: Unpack[RuleParts],
) -> ExchangedKeys:
    """Exchanges keys, the first of the two steps of context_parallel_dmattn, and returns them for `attend_to_pieces`. It needs
    no query.

    key, value, scores, group, attn_bias: as in context_parallel_dmattn.
    keep_window_size, rule: a KeyRule. A threshold needs keep_window_size. A sliding window of W keys is keep_window_size=0,
        recent_window=W.
    key_mask: bool [B, n], False for padding.
    cu_seqlens: int [documents + 1] (or [B, documents + 1]), offsets of packed documents in the whole sequence, the same on all
        ranks. Tokens after the last offset are padding. A document may extend over any number of ranks.
    position_ids: int [B or 1, N], positions of the whole sequence, instead of cu_seqlens. A document begins where
        positions begin again.
    lengths: the number of tokens of each rank, if the ranks have different numbers of tokens.
    headroom: key and value are [B, places + n, Hkv, D]. The first `places` rows (`boundary_places`) are uninitialised,
        and keys of other ranks are written to them. Without headroom, key and value are copied to tensors with such
        rows.
    exchange: how keys reach the ranks that see them.
        "direct": one collective; a rank moves up to (R - 1) keep_window_size rows.
        "two_hops": two collectives; a rank moves fewer than 2 keep_window_size rows (3 in backward).
        "auto": "direct" for two ranks, otherwise "two_hops".
    nonfinite: as in flash_dmattn_func. It applies to `attend_to_pieces` too.
    check: whether the ranks compare a hash of their arguments. None: in the group's first call, and in every call if
        torch.distributed debugs (TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL); True: in every call; False: in no call. If
        the arguments differ, all ranks raise an error with their own. In a call that compares, the host waits for the
        device. In a call that does not, ranks that disagree may deadlock, and so may those that disagree on `check`.
    stream: the CUDA stream that runs the exchange, forward and backward, while the current stream continues with other
        work (the projection of queries). `attend_to_pieces` waits for this stream. None: the current stream.

    `attend_to_pieces` compares its options in a collective of its own, according to `check`.
    """
    call = ExchangeCall(
        key, value, scores, SelectionRule.of_keywords(keep_window_size, rule), attn_bias, key_mask, cu_seqlens, position_ids, lengths, headroom, exchange,
        nonfinite, check, stream,
    )  # fmt: skip
    return begin_call(group, call)


def begin_call(
    group: Group | Collectives,
    call: ExchangeCall,
    query: Tensor | None = None,
    options: AttendOptions | None = None,
) -> ExchangedKeys:
    """Does what `begin_exchange` does, and checks and compares what `attend_with_options` will get before the exchange.

    query, options: both, or neither if they are not known yet.
    """
    collectives = collectives_of(group)

    def compared_arguments(checked: ExchangeArguments) -> dict[str, object]:
        compared = checked.compared_arguments(call)
        return compared if options is None else compared | options.compared_arguments(query)

    checked = collectives.agreed_result(
        "begin_exchange",
        lambda: ExchangeArguments.from_call(collectives, call, query, options),
        compared_arguments,
        call.check,
    )
    states = checked.key, checked.value, checked.bias, checked.scores
    if checked.boundary.places:
        with _on_stream(call.stream, *states, checked.present):
            states = PrependEarlierKeys.apply(*states, checked)
    else:
        none = checked.scores.new_empty((*checked.scores.shape[:2], 0), dtype=torch.int32)
        states = *states, none
    key, value, bias, scores, positions = states
    if bias is not None and not checked.bias.requires_grad:
        bias = bias.detach()
    return ExchangedKeys(
        boundary=checked.boundary,
        key=key,
        value=value,
        scores=(bias if checked.bias_is_score else scores).detach(),
        bias=bias,
        bias_is_score=checked.bias_is_score,
        positions=positions,
        present=checked.present,
        documents=checked.documents,
        stream=call.stream,
        collectives=collectives if options is None and may_read() else None,
        check=call.check,
    )


@contextmanager
def _on_stream(stream: torch.cuda.Stream | None, *tensors: Tensor | None) -> Iterator[None]:
    """Runs the block on `stream`, after the current stream has made `tensors`. None: on the current stream."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
    _keep_for(stream, tensors)


def _keep_for(stream: torch.cuda.Stream, tensors: Iterable[Tensor | None]) -> None:
    """Keeps the allocator from reusing the memory of `tensors` before `stream` has read them."""
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)


def attend_to_pieces(
    query: Tensor,
    exchanged: ExchangedKeys,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    sink_logits: Tensor | None = None,
    bias_delay: int = 0,
    zero_sum: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of this piece's queries [B, n, Hq, D] to the keys that `begin_exchange` returned.

    The options are as in context_parallel_dmattn. Returns out [B, n, Hq, D], or (out, lse [B, Hq, n]) with return_lse.
    """
    options = AttendOptions(
        scale, softcap, deterministic, sink_logits, bias_delay, zero_sum, return_lse, backend
    )
    return attend_with_options(query, exchanged, options)


def attend_with_options(
    query: Tensor, exchanged: ExchangedKeys, options: AttendOptions
) -> Tensor | tuple[Tensor, Tensor]:
    """Does what `attend_to_pieces` does."""
    check_exchanged(exchanged)
    if exchanged.collectives is not None:
        n = exchanged.scores.shape[2] - exchanged.boundary.places
        exchanged.collectives.agreed_result(
            "attend_to_pieces",
            lambda: options.check(query, exchanged.key, n, exchanged.bias),
            lambda _: options.compared_arguments(query),
            exchanged.check,
        )
    rule = exchanged.boundary.rule
    if exchanged.stream is not None:
        current = torch.cuda.current_stream(exchanged.stream.device)
        current.wait_stream(exchanged.stream)
        states = (
            exchanged.key,
            exchanged.value,
            exchanged.scores,
            exchanged.positions,
            exchanged.bias,
        )
        _keep_for(current, states)
    numerics = options.numerics("saturate" if exchanged.boundary.saturate else "propagate")
    bias = exchanged.bias
    if options.zero_sum and bias is not None:
        bias = with_zero_sum_gradient(bias)
    own_row = None
    if rule.is_window() and exchanged.documents is None and not options.bias_delay:
        # A window needs only the order of the keys, and they are in the order of their positions.
        visible = Visible(None, True)
        scores = None if exchanged.bias_is_score else exchanged.scores
    else:
        own_row, visible = seen_keys(exchanged)
        rule = scores = None
    out, statistics = attention(
        query,
        exchanged.key,
        exchanged.value,
        bias,
        visible,
        numerics,
        rule=rule,
        scores=scores,
        backend=options.backend,
        bias_delay=options.bias_delay,
        own_row=own_row,
    )
    return with_lse(
        out, statistics, options.return_lse, None, options.sink_logits, numerics.saturate
    )


def check_exchanged(exchanged: object) -> None:
    if not isinstance(exchanged, ExchangedKeys):
        raise TypeError(
            f"exchanged: got {type(exchanged).__name__}, expected the result of begin_exchange"
        )


def seen_keys(exchanged: ExchangedKeys) -> tuple[Tensor, Visible]:
    """Returns the row at each key's position, int64 [B, Hkv, places + n], and the keys that each query sees."""
    boundary = exchanged.boundary
    own_row, selected = select_in_piece(
        exchanged.scores,
        exchanged.positions,
        exchanged.present,
        exchanged.documents,
        boundary.pieces.begin(),
        boundary.rule,
    )
    n = exchanged.scores.shape[2] - boundary.places
    return own_row, Visible(
        intervals=KeyIntervals(selected, n, boundary.rule.key_bound(is_causal=True))
    )


def bias_without_sinks(exchanged: ExchangedKeys) -> ExchangedKeys:
    """Returns the keys with the bias of sinks set to 0, so that the bias of a sink gets no gradient."""
    boundary, places = exchanged.boundary, exchanged.boundary.places
    if not boundary.rule.sink_tokens or exchanged.bias is None:
        return exchanged
    n = exchanged.scores.shape[2] - places
    shown = shown_in_piece(
        exchanged.positions, n, exchanged.present, exchanged.documents, boundary.pieces.begin()
    )
    is_sink = find_sinks(shown, boundary.rule)
    return exchanged._replace(bias=torch.where(is_sink, 0, exchanged.bias))
