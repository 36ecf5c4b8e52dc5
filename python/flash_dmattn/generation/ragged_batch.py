"""The sequences of a step of an engine, in groups that run together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .._core.checks import (
    LARGEST_COUNT,
    check_count,
    check_tensor,
    resolve_flag,
)
from .._core.kv_checks import (
    check_rows_differ,
    rows_on_host,
)
from .cache import KVSlots

T = TypeVar("T")

# Prompts whose lengths have the same number of bits run together, padded to the longest, if at least this many of these
# lengths differ. With fewer lengths, one launch for each prompt takes less time than gathering and padding. On a CPU,
# padding always takes longer.
_LENGTHS_TO_PAD = {"cuda": 5, "cpu": 2**31}
# Later chunks run together, padded to the longest, while this multiplies their tokens by at most this number. Each group
# of them takes a GPU's host longer than most chunks take the GPU (0.37 ms for 0.14 ms of kernels with 2,000 tokens, H100).
# 1: only chunks of one length run together.
_CHUNK_PADDING = {"cuda": 2, "cpu": 1}


def value_for_device(table: dict[str, T], device: torch.device) -> T:
    return table.get(device.type, table["cpu"])


class Group(NamedTuple):
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
                value_for_device(_LENGTHS_TO_PAD, rows.device),
                value_for_device(_CHUNK_PADDING, rows.device),
            )
        ]

    @classmethod
    def of_rows(cls, rows: Tensor) -> RaggedBatch:
        """Returns a decoding step in which token i goes to rows[i]. rows: int32 [tokens]; a negative number means no row.

        Rows are not copied but read at each call, so that one CUDA graph can run with any rows.
        """
        check_tensor(rows, "rows")
        if rows.dtype != torch.int32 or rows.dim() != 1:
            raise ValueError(
                f"rows: got {rows.dtype} of shape {tuple(rows.shape)}, expected torch.int32 of one dimension"
            )
        batch = object.__new__(cls)
        batch._host_rows = None
        group = Group(slice(0, len(rows)), rows, False)
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


def _make_group(offsets: Sequence[int], rows: Tensor, numbers: list[int], begins: bool) -> Group:
    first, end = numbers[0], numbers[-1] + 1
    sizes = {offsets[number + 1] - offsets[number] for number in numbers}
    if end - first == len(numbers) and len(sizes) == 1:
        return Group(slice(offsets[first], offsets[end]), rows[first:end].clone(), begins)
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
        return Group(tokens, rows[chosen], begins)
    return Group(tokens, rows[chosen], begins, lengths, real, tokens.flatten()[real])


def copy_to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """Copies a tensor to a device. The host does not wait, because the copy is made from pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
