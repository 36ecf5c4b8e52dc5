"""A step of an engine in which each sequence adds any number of tokens: one call for prompts, chunks and decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .._core import finite
from .._core.checks import (
    LARGEST_COUNT,
    are_alike,
    check_count,
    check_flag,
    check_tensor,
    refuse_transforms,
    resolve_flag,
)
from .._core.kv_checks import (
    check_dtype_and_device,
    check_like,
    check_rows_differ,
    rows_on_host,
)
from .._core.numerics import Numerics
from ..functional import flash_dmattn_func
from ..keys.select import select_key_intervals
from .cache import KVSlots

T = TypeVar("T")


class PartSize(NamedTuple):
    """The size of the parts in which a later chunk is processed: max(per_place * places, least) tokens.

    A GPU compares every key of a part with every other one, which takes quadratic time, but each part costs extra
    kernel launches. A CPU launches no kernels.
    """

    per_place: int
    least: int

    def tokens(self, places: int) -> int:
        return max(self.per_place * places, self.least)


# The keys are device types. Other devices have the CPU's numbers.
_PART_SIZES = {"cuda": PartSize(4, 4096), "cpu": PartSize(1, 128)}
# Prompts whose lengths have the same number of bits run together, padded to the longest, if at least this many of these
# lengths differ. With fewer lengths, one launch for each prompt takes less time than gathering and padding. On a CPU,
# padding always takes longer.
_LENGTHS_TO_PAD = {"cuda": 5, "cpu": 2**31}
# Later chunks run together, padded to the longest, while this multiplies their tokens by at most this number. Each group
# of them takes a GPU's host longer than most chunks take the GPU (0.37 ms for 0.14 ms of kernels with 2,000 tokens, H100). 1: only
# chunks of one length run together.
_CHUNK_PADDING = {"cuda": 2, "cpu": 1}


def _value_for_device(table: dict[str, T], device: torch.device) -> T:
    return table.get(device.type, table["cpu"])


class _Group(NamedTuple):
    """The n sequences of a step that run together.

    tokens: the indices of their tokens in the step. A slice, if the sequences have one length and follow each other;
        otherwise int64 [n, length], where shorter sequences are padded on the right.
    rows: int32 [n]. A negative number means no row.
    begins: whether the tokens begin their sequences. The rows then hold keys of other sequences.
    lengths: int32 [n], the lengths of the sequences; None: all have `length` tokens.
    real: int64, the indices in tokens.flatten() that are not padding; None: all of them.
    places: int64, tokens.flatten()[real].
    """

    tokens: slice | Tensor
    rows: Tensor
    begins: bool
    lengths: Tensor | None = None
    real: Tensor | None = None
    places: Tensor | None = None

    @property
    def length(self) -> int:
        """Returns the number of tokens of each sequence, padding included."""
        if isinstance(self.tokens, slice):
            return (self.tokens.stop - self.tokens.start) // len(self.rows)
        return self.tokens.shape[1]

    @property
    def continues(self) -> bool:
        """Whether the tokens are later chunks of their texts, with more than one token each."""
        return not self.begins and self.length > 1


class RaggedBatch:
    """The sequences of a step, and the rows of a pool (KVSlots) that hold their states. All layers of a model share it."""

    def __init__(
        self, offsets: Sequence[int], rows: Tensor, begins: Sequence[bool] | None = None
    ) -> None:
        """
        Args:
            offsets: ascending integers, one more than there are sequences. Sequence i adds the tokens
                [offsets[i], offsets[i + 1]) of the step. They are on the host, because they decide how the step runs. A
                sequence without tokens is left out. Tokens before the first offset and after the last one are padding.
            rows: int32 [sequences], on the device of the pool, no row twice. They are copied. A negative number means
                no row. A later chunk of more than one token needs a row: without one, a CPU raises ValueError; a GPU
                does not read the rows, so it cannot check them, and attends to the chunk alone.
            begins: for each sequence, whether its text begins with these tokens. If so, the keys of its row are
                replaced, and attention runs over the tokens alone. None: no text begins. A row may still be empty.

        Raises:
            ValueError: the numbers of offsets, rows or begins do not match, or offsets descend. On a CPU also: two
                sequences with tokens have the same row, or a chunk has no row.
            TypeError: an argument has another type.
        """
        offsets = _checked_offsets(offsets)
        sequences = len(offsets) - 1
        check_tensor(rows, "rows")
        if rows.dtype != torch.int32 or tuple(rows.shape) != (sequences,):
            raise ValueError(
                f"rows: got {rows.dtype} of shape {tuple(rows.shape)}, expected torch.int32 of shape ({sequences},), one for "
                "each pair of neighbours in offsets"
            )
        begins = _checked_begins(begins, sequences)
        members: dict[tuple[int, bool], list[int]] = {}  # by length, and whether the text begins
        for number, (start, stop) in enumerate(pairwise(offsets)):
            if start < stop:
                members.setdefault((stop - start, begins[number]), []).append(number)
        self._length = offsets[-1] if members else 0
        # The rows on the host, keyed by the numbers of their sequences. None: they are read at each call.
        self._host_rows: dict[int, int] | None = rows_on_host(
            rows, sorted(number for numbers in members.values() for number in numbers)
        )
        check_rows_differ(self._host_rows)
        _check_chunk_rows(self._host_rows, offsets, begins)
        self._groups = [
            _make_group(offsets, rows, numbers, begins_text)
            for begins_text, numbers in _group_sequences(
                members,
                _value_for_device(_LENGTHS_TO_PAD, rows.device),
                _value_for_device(_CHUNK_PADDING, rows.device),
            )
        ]

    @classmethod
    def of_rows(cls, rows: Tensor) -> RaggedBatch:
        """Makes a decoding step in which token i goes to rows[i]. rows: int32 [tokens]; a negative number means no row.

        Rows are not copied but read at each call, so that one CUDA graph can run with any rows.
        """
        check_tensor(rows, "rows")
        if rows.dtype != torch.int32 or rows.dim() != 1:
            raise ValueError(
                f"rows: got {rows.dtype} of shape {tuple(rows.shape)}, expected torch.int32 of one dimension"
            )
        batch = object.__new__(cls)
        batch._host_rows = None
        group = _Group(slice(0, len(rows)), rows, False)
        batch._length, batch._groups = len(rows), [group] if len(rows) else []
        return batch

    def _check_rows(self, pool: KVSlots) -> None:
        """Raises unless the pool has all rows and each row occurs only once. It reads the values on the CPU only."""
        if not self._groups:
            return
        rows = self._groups[0].rows
        if rows.device != pool.k.device:
            raise TypeError(
                f"rows: got a tensor on {rows.device}, expected {pool.k.device}, the device of pool"
            )
        host_rows = self._host_rows
        if host_rows is None:
            host_rows = rows_on_host(rows, range(len(rows)))
            check_rows_differ(host_rows)
        for number, row in host_rows.items():
            if row >= pool.batch:
                raise ValueError(
                    f"rows[{number}]: got {row}, expected below {pool.batch}, the rows of pool, or negative"
                )

    def _rows_of_tokens(self, query: Tensor) -> Tensor:
        """Returns the row of each token for check mode, int32 [T]: negative if nothing reads the token."""
        rows = torch.full(query.shape[:1], -1, dtype=torch.int32, device=query.device)
        for group in self._groups:
            decodes = not (group.begins or group.continues)
            rows[group.tokens] = group.rows.view_as(rows[group.tokens]) if decodes else 0
        return rows

    @property
    def _is_in_order(self) -> bool:
        """Whether the groups cover all tokens before the last offset, one group after the other."""
        end = 0
        for group in self._groups:
            if not isinstance(group.tokens, slice) or group.tokens.start != end:
                return False
            end = group.tokens.stop
        return end == self._length

    @property
    def _decodes_in_order(self) -> bool:
        """Whether token i belongs to row i of the only group, and begins no text."""
        if len(self._groups) != 1:
            return False
        (group,) = self._groups
        return group.tokens == slice(0, len(group.rows)) and not group.begins


def _numbers_on_host(values: object, name: str, kind: str) -> list:
    if isinstance(values, (Tensor, str)) or not isinstance(values, Iterable):
        raise TypeError(
            f"{name}: got {type(values).__name__}, expected a sequence of {kind} on the host"
        )
    return list(values)


def _checked_offsets(offsets: object) -> list[int]:
    numbers = _numbers_on_host(offsets, "offsets", "integers")
    if not numbers:
        raise ValueError("offsets: got none, expected one more than there are sequences")
    for index, number in enumerate(numbers):
        if type(number) is not int or number < 0:  # other integers, such as numpy's, are accepted
            check_count(number, f"offsets[{index}]")
            numbers[index] = int(number)
    for index, (start, stop) in enumerate(pairwise(numbers)):
        if stop < start:
            raise ValueError(
                f"offsets[{index}]: got {start} before {stop}, expected 0 or more, ascending"
            )
    if numbers[-1] > LARGEST_COUNT:
        raise ValueError(
            f"offsets[{len(numbers) - 1}]: got {numbers[-1]}, expected at most {LARGEST_COUNT}"
        )
    return numbers


def _checked_begins(begins: object, sequences: int) -> list[bool]:
    if begins is None:
        return [False] * sequences
    flags = _numbers_on_host(begins, "begins", "bools")
    if len(flags) != sequences:
        raise ValueError(
            f"begins: got {len(flags)} flags, expected {sequences}, one for each sequence"
        )
    return [
        flag if type(flag) is bool else resolve_flag(flag, f"begins[{number}]")
        for number, flag in enumerate(flags)
    ]


def _check_chunk_rows(host_rows: dict[int, int], offsets: list[int], begins: list[bool]) -> None:
    for number, row in host_rows.items():
        length = offsets[number + 1] - offsets[number]
        if row < 0 and length > 1 and not begins[number]:
            raise ValueError(
                f"rows[{number}]: got {row}, expected 0 or more for a later chunk of {length} tokens"
            )


def _group_sequences(
    members: dict[tuple[int, bool], list[int]], least: int, padding: int
) -> list[tuple[bool, list[int]]]:
    """Returns (whether the texts begin, sequences) of each group.

    Sequences of one length form a group. Prompts whose lengths have the same number of bits form a group if they have
    `least` or more different lengths: padding to the longest then less than doubles the tokens. Later chunks form a group,
    from the longest on, while padding multiplies their tokens by at most `padding`.
    """
    sizes = Counter(length.bit_length() for length, begins in members if begins)
    longest = _padded_chunk_lengths(members, padding)
    groups: dict[tuple[bool, int, int], list[int]] = {}
    for (length, begins), numbers in members.items():
        bits = length.bit_length()
        key = (True, bits, 0 if sizes[bits] >= least else length)
        if not begins:
            key = (False, 0, longest.get(length, length))
        groups.setdefault(key, []).extend(numbers)
    return [(begins, sorted(numbers)) for (begins, _, _), numbers in groups.items()]


def _padded_chunk_lengths(
    members: dict[tuple[int, bool], list[int]], padding: int
) -> dict[int, int]:
    """Returns the length of the group's longest chunk for each length of later chunks."""
    longest: dict[int, int] = {}
    first = chunks = tokens = 0
    for length in sorted((n for n, begins in members if n > 1 and not begins), reverse=True):
        count = len(members[length, False])
        chunks, tokens = chunks + count, tokens + count * length
        if not first or first * chunks > padding * tokens:
            first, chunks, tokens = length, count, count * length
        longest[length] = first
    return longest


def _make_group(offsets: Sequence[int], rows: Tensor, numbers: list[int], begins: bool) -> _Group:
    first, end = numbers[0], numbers[-1] + 1
    sizes = {offsets[number + 1] - offsets[number] for number in numbers}
    if end - first == len(numbers) and len(sizes) == 1:
        return _Group(slice(offsets[first], offsets[end]), rows[first:end].clone(), begins)
    cpu = {"device": "cpu"}  # torch's default device may be another one
    starts = torch.tensor([offsets[number] for number in numbers], **cpu)[:, None]
    lengths = [offsets[number + 1] - offsets[number] for number in numbers]
    step = torch.arange(max(lengths), **cpu)
    lengths = torch.tensor(lengths, dtype=torch.int32, **cpu)[:, None]
    tokens, chosen = starts + torch.minimum(step, lengths - 1), torch.tensor(numbers, **cpu)
    real = (step < lengths).flatten().nonzero()[:, 0]
    on_device = (copy_to_device(rows.device, t) for t in (tokens, chosen, lengths[:, 0], real))
    tokens, chosen, lengths, real = on_device
    if len(real) == tokens.numel():
        return _Group(tokens, rows[chosen], begins)
    return _Group(tokens, rows[chosen], begins, lengths, real, tokens.flatten()[real])


def copy_to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """Copies a tensor to a device. The host does not wait, because the copy is made from pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@torch.no_grad()
def extend_ragged(
    pool: KVSlots,
    batch: RaggedBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    scores_are_bias: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Adds the tokens of a step to the slots of their sequences, and attends to these slots. Returns out [T, Hq, Dv].

    Each sequence has the result that it would have alone, except for rounding. Only rows of the batch change.

    Args:
        pool: the states of one layer, without pending tokens.
        batch: the sequences of the step, and their rows.
        query: [T, Hq, D]; key: [T, Hkv, D]; value: [T, Hkv, Dv].
        scores: float32 [Hkv, T]. Heads come first as in KVSlots; flash_dmattn_varlen_func takes [total_k, H].
        scale, softcap, scores_are_bias: as in KVSlots.step.
        return_lse: whether to return (out, lse), with lse [Hq, T].

    Returns:
        out, or (out, lse). Tokens that belong to no sequence have zeros in out, and -inf in lse.

    Raises, before any row changes:
        ValueError: there are fewer tokens than the batch has, or shapes do not match. On a CPU also: the pool does not
            have a row, or a row occurs twice.
        TypeError: an argument has another type, dtype or device.
    """
    length = _check_step(pool, batch, query, key, value, scores)
    scale, softcap, *_ = Numerics.from_arguments(scale, None, softcap, "saturate", None)
    options = {
        "scale": scale, "softcap": softcap, "scores_are_bias": check_flag(scores_are_bias, "scores_are_bias"), "return_lse": True,
    }  # fmt: skip
    return_lse = resolve_flag(return_lse, "return_lse")
    states = (query, key, value)
    if finite.is_enabled():
        finite.check_new_tokens(*states, batch._rows_of_tokens(query))
    if length == batch._length and batch._decodes_in_order:
        (group,) = batch._groups
        one = (t.unsqueeze(1) for t in states)
        out, lse = pool.over(group.rows).step(*one, scores.T.unsqueeze(2), **options)
        return (out.squeeze(1), lse.squeeze(2).T) if return_lse else out.squeeze(1)
    if not batch._groups:
        out = query.new_zeros((*query.shape[:2], pool.value_dim))
        lse = scores.new_full((query.shape[1], length), -torch.inf)
        return (out, lse) if return_lse else out
    groups = batch._groups
    # The remaining checks run before the first write. On a CPU, a copy of rows checks the counts of the whole pool; on
    # a GPU, a decode step checks that its kernel takes this number of query heads.
    first = next((number for number, group in enumerate(groups) if group.continues), None)
    copies = {} if first is None else {first: _copy_rows(pool, groups[first])}
    places, results = [None] * len(groups), [None] * len(groups)
    for number in sorted(range(len(groups)), key=lambda n: (groups[n].begins, groups[n].continues)):
        group = groups[number]
        tokens, count = group.tokens, len(group.rows)
        if isinstance(tokens, slice):  # views
            own_states = [t[tokens].unflatten(0, (count, -1)) for t in states]
            own_scores = scores[:, tokens].unflatten(1, (count, -1)).transpose(0, 1)
        else:
            own_states = [t[tokens] for t in states]
            own_scores = scores[:, tokens].transpose(0, 1)
            tokens = tokens.flatten()
        if group.begins:
            own_out, own_lse = _begin_texts(pool, group, *own_states, own_scores, options)
        elif group.continues:
            slots = copies.pop(number, None) or _copy_rows(pool, group)
            own_out, own_lse = slots.extend(
                *own_states, own_scores, lengths=group.lengths, **options
            )
            pool.over(group.rows).restore(slots)
        else:
            own_out, own_lse = pool.over(group.rows).step(*own_states, own_scores, **options)
        parts = (own_out, own_lse.transpose(1, 2)) if return_lse else (own_out,)
        parts = [part.flatten(0, 1) for part in parts]
        if group.real is not None:
            tokens, parts = group.places, [part[group.real] for part in parts]
        places[number], results[number] = tokens, parts
    if length == batch._length and batch._is_in_order:
        places = None
    out, *lse = (
        _place_results(parts, places, length, absent)
        for parts, absent in zip(zip(*results, strict=True), (0, -torch.inf), strict=False)
    )
    return (out, lse[0].T) if return_lse else out


def _check_step(
    pool: object, batch: object, query: object, key: object, value: object, scores: object
) -> int:
    """Checks all groups before the first one runs and changes the pool. Returns the number of tokens."""
    if not isinstance(pool, KVSlots):
        raise TypeError(f"pool: got {type(pool).__name__}, expected KVSlots")
    if not isinstance(batch, RaggedBatch):
        raise TypeError(f"batch: got {type(batch).__name__}, expected RaggedBatch")
    if pool.rows is not None or pool.pending:
        state = "a view of some rows" if pool.rows is not None else f"{pool.pending} pending tokens"
        raise ValueError(f"pool: got {state}, expected a cache of its own without pending tokens")
    batch._check_rows(pool)
    if not _states_fit(pool, query, key, value, scores):
        _check_states(pool, query, key, value, scores)
    length = query.shape[0]
    if length < batch._length:
        raise ValueError(f"query: got {length} tokens, expected {batch._length} or more")
    refuse_transforms(query=query, key=key, value=value, scores=scores)
    return length


def _states_fit(pool: KVSlots, query: object, key: object, value: object, scores: object) -> bool:
    """Returns True if the tensors of a step are known to fit a pool.

    This quick test saves 4 µs of a step. It returns False for tensors that fit only by a slower test.
    """
    if not are_alike(query, key, value) or type(scores) is not Tensor or len(query.shape) != 3:
        return False
    slots, heads, head_dim = pool.k, pool.heads_kv, pool.head_dim
    length, heads_q, query_dim = query.shape
    return (
        query.dtype is slots.dtype
        and query.device == slots.device == scores.device
        and key.shape == (length, heads, head_dim)
        and value.shape == (length, heads, pool.value_dim)
        and query_dim == head_dim
        and heads > 0
        and heads_q % heads == 0
        and scores.dtype is torch.float32
        and scores.layout is torch.strided
        and scores.shape == (heads, length)
    )


def _check_states(pool: KVSlots, query: object, key: object, value: object, scores: object) -> None:
    check_tensor(query, "query")
    heads, head_dim, shape = pool.heads_kv, pool.head_dim, query.shape
    if len(shape) != 3 or shape[2] != head_dim or (shape[1] % heads if heads else shape[1]):
        raise ValueError(
            f"query: got shape {tuple(shape)}, expected [T, Hq, {head_dim}] with Hq a multiple of {heads}"
        )
    dtype, device, length = pool.k.dtype, pool.k.device, shape[0]
    check_dtype_and_device(query, "query", dtype, device, "pool")
    for name, state, columns in (("key", key, head_dim), ("value", value, pool.value_dim)):
        check_tensor(state, name)
        if state.dim() == 3 and state.shape[0] != length:
            raise ValueError(
                f"{name}: got {state.shape[0]} tokens, expected {length}, those of query"
            )
        check_like(state, name, (length, heads, columns), dtype, device, "pool")
    check_like(scores, "scores", (heads, length), torch.float32, device)


def _place_results(
    parts: Sequence[Tensor], places: list[slice | Tensor] | None, length: int, absent: float
) -> Tensor:
    """Puts the results of the groups, [tokens of the group, ...], at their places in a step of `length` tokens.

    places: None: the groups are in order. absent: the result of a token that belongs to no group.
    """
    if places is None:
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    step = parts[0].new_full((length, *parts[0].shape[1:]), absent)
    for place, part in zip(places, parts, strict=True):
        step[place] = part
    return step


def _begin_texts(
    pool: KVSlots,
    group: _Group,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    options: dict,
) -> tuple[Tensor, Tensor]:
    """Computes attention over prompts, [n, length, Hq, Dv], and then fills the rows with their keys.

    Padding comes after the tokens of each prompt, so that no query of a prompt sees padding.
    """
    rule = pool.rule
    options = dict(options)
    bias = scores[:, :, None] if options.pop("scores_are_bias") else None
    keys = None
    # A rule with room for all keys still hides those whose score is NaN. A bias of NaN masks its key.
    if bias is None or not rule.has_room_for(query.shape[1]):
        keys = select_key_intervals(scores, **rule._asdict())
    result = flash_dmattn_func(
        query, key, value, None, bias, is_causal=True, key_intervals=keys, backend=pool.backend or None, **options
    )  # fmt: skip
    if group.lengths is not None:
        keys = None  # these intervals are for the longest prompt
    pool.over(group.rows).fill(key, value, scores, keys, lengths=group.lengths)
    return result


def _copy_rows(pool: KVSlots, group: _Group) -> KVSlots:
    """Copies the rows to a cache with room for pending tokens, which the pool lacks. Their attention takes longer."""
    most = _value_for_device(_PART_SIZES, pool.k.device).tokens(pool.places)
    return pool.select(group.rows, chunk=min(group.length, most))
