"""The arguments of both steps of context parallelism in normal form, and what the ranks of a group compare of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..._core.availability import unavailable_reason
from ..._core.checks import (
    DTYPES,
    MASK_VALUE,
    autocast_tensors,
    check_bias_delay,
    check_count,
    check_device,
    check_on_device,
    check_tensor,
    refuse_all_transforms,
    refuse_transforms,
    resolve_backend,
    resolve_flag,
    widen_bias,
)
from ..._core.gradients import expand
from ..._core.kv_checks import check_query
from ..._core.numerics import Numerics, resolve_nonfinite
from ...keys.positions import check_length, check_offsets
from ...keys.rule import SelectionRule
from ...merge import check_sink_logits
from .collectives import Collectives
from .kinds import Exchange, choose_exchange
from .pieces import Boundary, PieceOffsets, begins_of_documents

SCORES = "scores"  # the value of attn_bias that also adds the scores as a bias


class AttendOptions(NamedTuple):
    """Arguments of `attend_to_pieces`. They must be the same on all ranks, except return_lse, which affects one
    rank."""

    scale: float | None = None
    softcap: float | None = None
    deterministic: bool | None = None
    sink_logits: Tensor | None = None
    bias_delay: int = 0
    zero_sum: bool = False
    return_lse: bool = False
    backend: str | None = None

    def numerics(self, nonfinite: str) -> Numerics:
        return Numerics.from_arguments(
            self.scale, None, self.softcap, nonfinite, self.deterministic
        )

    def check(self, query: Tensor, key: Tensor, n: int, bias: Tensor | None) -> None:
        """Raises what `attend_to_pieces` would raise, before other ranks wait for this one.

        key: [B, any number, Hkv, D]. n: the number of tokens in this piece. bias: as in `ExchangedKeys`.
        """
        check_tensor(query, "query")
        (cast,) = autocast_tensors(query)
        queries = check_query(key, of="key", query=cast)
        if queries != n:
            raise ValueError(f"query: got {queries} queries, expected one for each of {n} tokens")
        self.numerics("saturate")
        check_bias_delay(self.bias_delay, bias)
        resolve_flag(self.zero_sum, "zero_sum")
        resolve_flag(self.return_lse, "return_lse")
        if self.sink_logits is not None:
            check_sink_logits(self.sink_logits, query)
        backend = resolve_backend(self.backend)
        if backend:
            unavailable_reason(backend)  # raises if the backend is unknown
        check_device(cast, backend)

    def compared_arguments(self, query: Tensor) -> dict[str, object]:
        """Returns the arguments that must be equal on all ranks, by name."""
        numerics = self.numerics("saturate").with_scale_for(query.shape[3])
        sink_logits = self.sink_logits
        return {
            "query_heads": query.shape[2],
            "scale": numerics.scale,
            "softcap": numerics.softcap,
            "deterministic": bool(numerics.deterministic),
            "sink_logits": None if sink_logits is None else sink_logits.dtype,
            "bias_delay": int(self.bias_delay),
            "zero_sum": resolve_flag(self.zero_sum, "zero_sum"),
            "backend": self.backend,
        }


class ExchangeCall(NamedTuple):
    """The arguments of `begin_exchange` as the caller gave them, except the group."""

    key: Tensor
    value: Tensor
    scores: Tensor
    rule: SelectionRule
    attn_bias: str | Tensor | None = SCORES
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | Sequence[int] | None = None
    position_ids: Tensor | None = None
    lengths: Sequence[int] | None = None
    headroom: bool = False
    exchange: str = "auto"
    nonfinite: str = "saturate"
    check: bool | None = None
    stream: torch.cuda.Stream | None = None


class ExchangeArguments(NamedTuple):
    """The checked arguments of one call of `begin_exchange` in normal form."""

    boundary: Boundary
    exchange: Exchange
    key: Tensor  # [B, n, Hkv, D]; with headroom, `places` free rows come first
    value: Tensor
    headroom: bool
    scores: Tensor  # float32 [B, Hkv, n]; a key whose score is NaN is never selected
    bias: Tensor | None  # float32 [B, Hkv, n]; equals `scores` if bias_is_score
    bias_is_score: bool
    present: Tensor | None  # bool [B, Hkv or 1, n]
    documents: Tensor | None  # int64 [B or 1, documents + 1]

    @classmethod
    def from_call(
        cls,
        collectives: Collectives,
        call: ExchangeCall,
        query: Tensor | None,
        options: AttendOptions | None,
    ) -> ExchangeArguments:
        """Checks the arguments of a call. query, options: for `attend_to_pieces`; both None: they are not known yet."""
        _check_stream(call.stream)
        rule = call.rule.checked_state_rule()
        headroom = resolve_flag(call.headroom, "headroom")
        key, value = autocast_tensors(call.key, call.value)
        scores, attn_bias = call.scores, call.attn_bias
        _check_rows(key, value)
        batch, rows, heads, _ = key.shape
        rule.check_heads(heads)
        check_tensor(scores, "scores")
        n = scores.shape[-1] if scores.dim() else 0
        pieces = PieceOffsets.from_lengths(
            collectives.rank, checked_lengths(call.lengths, collectives, n)
        )
        documents = _documents(
            call.cu_seqlens, call.position_ids, batch, pieces.begins[-1], key.device
        )
        begun = None if documents is None else begins_of_documents(documents, pieces.begins)
        boundary = Boundary.from_rule(pieces, rule, heads, begun, resolve_nonfinite(call.nonfinite))
        expected = n + (boundary.places if headroom else 0)
        if rows != expected:
            words = f"{boundary.places} places and {n} tokens" if headroom else f"{n} tokens"
            raise ValueError(
                f"key: got {rows} rows, expected {expected}: as many as scores have ({words})"
            )
        scores = _per_key(scores, "scores", key, n)
        bias_is_score = isinstance(attn_bias, str)
        refuse = refuse_all_transforms if boundary.places else refuse_transforms
        refuse(
            query=query,
            key=key,
            value=value,
            scores=scores,
            attn_bias=attn_bias,
            key_mask=call.key_mask,
            sink_logits=options.sink_logits if options else None,
        )
        if bias_is_score and attn_bias != SCORES:
            raise ValueError(f"attn_bias: got {attn_bias!r}, expected 'scores', a tensor or None")
        present = _checked_mask(call.key_mask, batch, n, key.device)
        bias = None
        if bias_is_score:
            bias = scores
        elif attn_bias is not None:
            bias = _per_key(attn_bias, "attn_bias", key, n)
        # As in flash_dmattn_func, a bias that masks its key excludes the key from the selection and from the sinks.
        if bias is not None and rule.sink_tokens > 0:
            shown = bias.detach() > MASK_VALUE[bias.dtype]
            present = shown if present is None else present & shown
        elif bias is not None and not bias_is_score:
            scores = scores.masked_fill(bias.detach() <= MASK_VALUE[bias.dtype], float("nan"))
        if present is not None:
            scores = scores.masked_fill(~present, float("nan"))
        if bias_is_score:
            bias = scores
        if options is not None:
            options.check(query, key, n, bias)
        return cls(
            boundary=boundary,
            exchange=choose_exchange(call.exchange, collectives)(collectives, boundary),
            key=key,
            value=value,
            headroom=headroom,
            scores=scores.detach(),
            bias=bias,
            bias_is_score=bias_is_score,
            present=present,
            documents=documents,
        )

    def compared_arguments(self, call: ExchangeCall) -> dict[str, object]:
        """Returns the arguments that must be equal on all ranks, by name."""
        rule, begins = self.boundary.rule, self.boundary.pieces.begins
        batch, _, heads, head_dim = self.key.shape
        documents = None
        if self.documents is not None:  # may be on a GPU: the host waits for it only here
            offsets = check_offsets(self.documents.cpu(), "cu_seqlens", begins[-1], batched=True)
            documents = offsets.tolist()
        rows_learn, bias_learns = (
            torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
            for tensors in ((self.key, self.value), (self.bias,))
        )
        return {
            "batch": batch,
            "heads": heads,
            "head_dim": head_dim,
            "value_dim": self.value.shape[3],
            "dtype": self.key.dtype,
            "lengths": [b - a for a, b in pairwise(begins)],
            **rule._asdict(),
            "scores": _form_of(call.scores),
            "documents": documents,
            "attn_bias": _form_of(call.attn_bias),
            "exchange": type(self.exchange).__name__,
            "saturate": self.boundary.saturate,
            "requires_grad": (rows_learn, bias_learns),
        }


def _form_of(values: Tensor | str | None) -> object:
    """Returns a word, None, or a tensor's dtype and shape without the last dimension, in which ranks may differ."""
    return (values.dtype, *values.shape[:-1]) if isinstance(values, Tensor) else values


def _check_stream(stream: object) -> None:
    if stream is None or torch.compiler.is_compiling() or isinstance(stream, torch.cuda.Stream):
        return
    raise TypeError(f"stream: got {type(stream).__name__}, expected a torch.cuda.Stream or None")


def _check_rows(key: Tensor, value: Tensor) -> None:
    for name, tensor in (("key", key), ("value", value)):
        check_tensor(tensor, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected [B, n, Hkv, D]")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value: got shape {tuple(value.shape)}, expected {tuple(key.shape[:3])} and a head dimension"
        )
    if key.dtype not in DTYPES or value.dtype != key.dtype or value.device != key.device:
        raise TypeError(
            f"value: got {value.dtype} on {value.device} with a key of {key.dtype} on {key.device}, expected a floating dtype, "
            "the same of both"
        )


def checked_lengths(
    lengths: Sequence[int] | None, collectives: Collectives, n: int
) -> tuple[int, ...]:
    if lengths is None:
        return (n,) * collectives.size
    expected = f"expected a number for each of {collectives.size} ranks"
    if isinstance(lengths, Tensor) or not isinstance(lengths, Collection):
        raise TypeError(f"lengths: got {type(lengths).__name__}, {expected}")
    if len(lengths) != collectives.size:
        raise ValueError(f"lengths: got {lengths!r}, {expected}")
    lengths = tuple(lengths)
    for length in lengths:
        check_count(length, "lengths")
    if lengths[collectives.rank] != n:
        raise ValueError(
            f"lengths: got {lengths[collectives.rank]} for rank {collectives.rank}, expected {n}, the tokens that it has"
        )
    return tuple(map(int, lengths))


def _per_key(values: Tensor, name: str, key: Tensor, n: int) -> Tensor:
    """Checks a tensor with one value per key, and returns it as float32 [B, Hkv, n]."""
    check_tensor(values, name)
    batch, _, heads, _ = key.shape
    if values.dim() == 4 and values.shape[2] == 1:
        values = values.squeeze(2)
    fits = values.dim() == 3 and values.shape[0] in (1, batch) and values.shape[1] in (1, heads)
    if not fits or values.shape[2] != n:
        raise ValueError(
            f"{name}: got shape {tuple(values.shape)}, expected one value per key: [{batch}, {heads} or 1, {n}]"
        )
    if not values.is_floating_point() or values.dtype == torch.float64:
        raise TypeError(f"{name}: got {values.dtype}, expected float32 or 16 bits")
    check_on_device(values, name, key.device)
    return expand(widen_bias(values, torch.float32), (batch, heads, n))


def _checked_mask(
    key_mask: Tensor | None, batch: int, n: int, device: torch.device
) -> Tensor | None:
    if key_mask is None:
        return None
    check_tensor(key_mask, "key_mask")
    if key_mask.dtype != torch.bool or tuple(key_mask.shape) != (batch, n):
        raise ValueError(
            f"key_mask: got {key_mask.dtype} of shape {tuple(key_mask.shape)}, expected bool [{batch}, {n}]: padding of this "
            "rank's tokens; masks over pairs of tokens would need the keys of all ranks"
        )
    check_on_device(key_mask, "key_mask", device)
    return key_mask[:, None]


def _documents(
    cu_seqlens: Tensor | Sequence[int] | None,
    position_ids: Tensor | None,
    batch: int,
    total: int,
    device: torch.device,
) -> Tensor | None:
    """Returns the offsets of the documents, int64 [B or 1, documents + 1], or None if the call names no documents."""
    if cu_seqlens is None:
        if position_ids is None:
            return None
        return offsets_of_positions(position_ids, batch, total).to(device)
    if position_ids is not None:
        raise ValueError(
            "position_ids: got positions together with cu_seqlens, expected one of them"
        )
    offsets = checked_offsets(cu_seqlens, total, batched=True)
    if offsets.dim() == 2 and offsets.shape[0] not in (1, batch):
        raise ValueError(
            f"cu_seqlens: got shape {tuple(offsets.shape)}, expected [documents + 1] or [{batch}, documents + 1]"
        )
    offsets = offsets.to(device=device, dtype=torch.int64)
    return offsets.reshape(-1, offsets.shape[-1])


def checked_offsets(
    cu_seqlens: Tensor | Iterable[int], total: int, *, batched: bool = False
) -> Tensor:
    """Checks the offsets of packed documents in `total` tokens. It does not read the values of a tensor on a GPU."""
    if not isinstance(cu_seqlens, Tensor):
        if isinstance(cu_seqlens, str) or not isinstance(cu_seqlens, Iterable):
            raise TypeError(
                f"cu_seqlens: got {type(cu_seqlens).__name__}, expected a tensor or a sequence of offsets"
            )
        offsets = list(cu_seqlens)
        for offset in offsets:
            check_length(offset, "cu_seqlens")  # torch would round a float
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    return check_offsets(cu_seqlens, "cu_seqlens", total, batched=batched)


def checked_positions(position_ids: Tensor, batch: int, total: int) -> Tensor:
    """Checks the positions of the whole sequence, and returns them as [B or 1, N]."""
    check_tensor(position_ids, "position_ids")
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    if position_ids.is_floating_point() or tuple(position_ids.shape) not in (
        (1, total),
        (batch, total),
    ):
        raise ValueError(
            f"position_ids: got {position_ids.dtype} of shape {tuple(position_ids.shape)}, expected integers of the whole "
            f"sequence, [{batch} or 1, {total}]"
        )
    return position_ids


def offsets_of_positions(
    position_ids: Tensor, batch: int, total: int, *, read: bool = False
) -> Tensor:
    """Returns where documents begin, int64 [B or 1, N + 1]. All entries after the last document are `total`.

    read: whether the host may wait for a GPU to check the order of the tokens. The order is always checked on the CPU.
    """
    position_ids = checked_positions(position_ids, batch, total)
    begins = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 2) != 1
    # Padding tokens have the position 0 or 1.
    first = position_ids[:, :1].clamp(min=1)
    if (read or position_ids.is_cpu) and bool((begins & (position_ids > first)).any()):
        raise ValueError(
            "position_ids: got positions that go on elsewhere in the sequence, expected pieces in the order of positions: "
            "the head-tail order of torch's context parallelism (its load balancer) is another"
        )
    index = torch.arange(total, device=position_ids.device).expand_as(begins)
    offsets = torch.where(begins, index, total).sort(dim=1).values
    return torch.nn.functional.pad(offsets, (0, 1), value=total)
