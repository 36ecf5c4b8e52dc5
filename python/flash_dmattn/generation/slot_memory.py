"""The memory of a KV cache of slots: the tensors, views of rows, copies, and saved states."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from .._core import ops
from .._core.checks import check_count, check_head_dim, check_tensor, resolve_backend
from .._core.kv_checks import (
    as_row_indices,
    check_counts,
    check_head_windows,
    check_not_expanded,
    check_rows_differ,
    check_slot_kernels,
    check_slots,
    check_value_dim,
    rows_on_host,
)
from .._dispatch import IN_PYTHON
from ..keys.rule import RuleParts, SelectionRule, takes_rule

_ARRAYS = ("k", "v", "scores", "positions", "counts", "seen")
_COUNTERS = 8  # the size of the last dimension of `counts`
_FLOAT32_ON_A_GPU = "Use one of them, or flash_dmattn_with_kvcache on a cache of all keys"


def _resolve_slot_backend(backend: object) -> str:
    if backend in IN_PYTHON:
        raise ValueError(
            f"backend: got {backend!r}, which has no KV cache, expected 'cuda', 'cpu', 'reference', or None for the first that "
            "supports the problem"
        )
    return resolve_backend(backend)


class SlotMemory:
    """The tensors of a KVSlots and the rule that says how many keys they hold."""

    rows: Tensor | None = None
    _pool: Self | None = None  # of a view: its cache, which alone knows about pending tokens

    @takes_rule
    def __init__(
        self,
        batch: int,
        heads_kv: int,
        keep_window_size: int | Sequence[int],
        head_dim: int,
        *,
        value_dim: int | None = None,
        chunk: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        backend: str | None = None,
        **rule: Unpack[RuleParts],
    ):
        for name, value in (
            ("batch", batch),
            ("heads_kv", heads_kv),
            ("head_dim", head_dim),
            ("value_dim", head_dim if value_dim is None else value_dim),
            ("chunk", chunk),
        ):
            check_count(value, name)
        self._set_rule(heads_kv, keep_window_size, rule)
        check_head_dim(head_dim, "head_dim: got")
        value_dim = head_dim if value_dim is None else value_dim
        check_value_dim(value_dim, head_dim)
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"dtype: got {dtype}, expected float32, bfloat16 or float16")
        self.backend = _resolve_slot_backend(backend)
        self.pending, self.is_empty = 0, True
        shape = self._shape_of_slots(batch, heads_kv, chunk)
        # Slots are zeros, because a kernel may load a slot without a key.
        try:
            self.k = torch.zeros((*shape, head_dim), dtype=dtype, device=device)
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            raise type(error)(
                f"keep_window_size: got a rule of {self.places} keys for each head, for which there is no memory: {error}"
            ) from None
        check_slot_kernels(
            "dtype", dtype, head_dim, value_dim, self.k.device, instead=_FLOAT32_ON_A_GPU
        )
        check_head_windows(len(self.rule.windows()), self.k.device)
        self.v = torch.zeros((*shape, value_dim), dtype=dtype, device=device)
        self.scores = torch.zeros(shape, dtype=torch.float32, device=device)
        self.positions = torch.zeros(shape, dtype=torch.int32, device=device)
        self.counts = torch.zeros((batch, heads_kv, _COUNTERS), dtype=torch.int32, device=device)
        self.seen = torch.zeros(batch, dtype=torch.int32, device=device)

    @classmethod
    @takes_rule
    def from_tensors(
        cls,
        keep_window_size: int | Sequence[int],
        k: Tensor,
        v: Tensor,
        scores: Tensor,
        positions: Tensor,
        counts: Tensor,
        seen: Tensor,
        *,
        pending: int = 0,
        backend: str | None = None,
        **rule: Unpack[RuleParts],
    ) -> Self:
        """Returns a cache over existing tensors, which it changes in place. It is empty if counts and seen are zeros.

        k, v, scores, positions, counts, seen: of the shapes of KVSlots' attributes. k and v have to hold finite numbers from
            the start, such as zeros. Each row is dense, but rows may be any distance apart, as in blocks of an engine's
            memory.
        pending: the number of pending tokens. If there are any, all tensors except k and v have to be contiguous.
        keep_window_size, rule, backend: as in KVSlots.
        """
        cache = object.__new__(cls)
        for name, tensor in zip(_ARRAYS, (k, v, scores, positions, counts, seen), strict=True):
            check_tensor(tensor, name)
            check_not_expanded(tensor, name)
            setattr(cache, name, tensor)
        if counts.dim() != 3:
            raise ValueError(f"counts: got shape {tuple(counts.shape)}, expected [B, Hkv, 8]")
        cache._set_rule(cache.heads_kv, keep_window_size, rule)
        equal = cache.rule.has_equal_heads()
        for name, tensor in (("k", k), ("v", v)):
            if tensor.dim() != (4 if equal else 3):
                expected = "[B, Hkv, places + chunk, D]"
                if not equal:
                    expected = "[B, total, D], since heads have windows of different sizes"
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {expected}")
        check_value_dim(v.shape[-1], k.shape[-1])
        cache._check_slots(pending)
        check_slot_kernels(
            "k", k.dtype, k.shape[-1], v.shape[-1], k.device, instead=_FLOAT32_ON_A_GPU
        )
        check_head_windows(len(cache.rule.windows()), k.device)
        cache.backend = _resolve_slot_backend(backend)
        cache.pending, cache.is_empty = pending, False
        return cache

    def _set_rule(self, heads_kv: int, keep_window_size: object, rule: RuleParts) -> None:
        self.rule = SelectionRule.of_keywords(keep_window_size, rule).checked_cache_rule()
        self.rule.check_heads(heads_kv)
        self._rule_arguments = self.rule.cache_arguments()

    @property
    def keep_window_size(self) -> int | tuple[int, ...]:
        """Returns the window of all key heads, or of each."""
        return self.rule.keep_window_size

    @property
    def places(self) -> int:
        """Returns the number of slots for the keys of a head, the largest one if heads have windows of different sizes.

        The slots of a head after them are for pending tokens.
        """
        return self.rule.place_count()

    @property
    def heads_kv(self) -> int:
        """Returns the number of key heads."""
        return self.counts.shape[1]

    @property
    def head_dim(self) -> int:
        """Returns the head dimension of keys."""
        return self.k.shape[-1]

    @property
    def batch(self) -> int:
        """Returns the number of rows, in a view that of its rows."""
        return self.k.shape[0] if self.rows is None else self.rows.shape[0]

    @property
    def chunk(self) -> int:
        """Returns the maximum number of pending tokens."""
        if self._has_equal_heads:
            return self.k.shape[2] - self.places
        heads = self.heads_kv
        return (self.k.shape[1] - sum(self.rule.places_of_heads(heads))) // heads

    @property
    def value_dim(self) -> int:
        """Returns the head dimension of values."""
        return self.v.shape[-1]

    @property
    def _has_equal_heads(self) -> bool:
        """Whether slots are [B, Hkv, slots, ...]. Otherwise they are [B, total, ...], head by head."""
        return self.k.dim() == 4

    def _shape_of_slots(self, batch: int, heads: int, chunk: int) -> tuple[int, ...]:
        """Returns the shape of `scores` and `positions`."""
        if self.rule.has_equal_heads():
            return batch, heads, self.places + chunk
        return batch, sum(self.rule.places_of_heads(heads)) + heads * chunk

    def _check_slots(self, pending: int) -> None:
        places = self.rule.places_of_heads(self.heads_kv)
        if self._has_equal_heads:  # the slots of a head have a dimension of their own
            places = places[:1]
        check_slots(sum(places), pending, self.k.shape[-2], len(places))

    def _head_ranges(self) -> list[tuple[int, int]]:
        """Returns where the slots of each head begin, and those of its pending tokens, among all slots of a row."""
        ranges, first = [], 0
        chunk = self.chunk
        for places in self.rule.places_of_heads(self.heads_kv):
            ranges.append((first, first + places))
            first += places + chunk
        return ranges

    def pending_part(self, slots: Tensor) -> Tensor:
        """Returns the slots of the pending tokens, [B, Hkv, pending, ...], of a tensor of slots."""
        if self._has_equal_heads:
            return slots[:, :, self.places : self.places + self.pending]
        parts = [slots[:, first : first + self.pending] for _, first in self._head_ranges()]
        return torch.stack(parts, 1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors in the order of the operators' arguments."""
        return self.k, self.v, self.scores, self.positions, self.counts, self.seen

    @property
    def _arguments(self) -> tuple:
        """Returns the first arguments of operators without an argument `rows`."""
        self._refuse_rows()
        return *self.tensors, *self._rule_arguments

    def _refuse_rows(self) -> None:
        if self.rows is not None:
            raise ValueError(
                "rows: got a view of some rows, expected a cache of its own: `snapshot` makes one, and `restore` writes it "
                "back"
            )

    def _checked_rows(self) -> Tensor | None:
        """Returns `rows` for an operator that changes them. On a CPU, raises for a row that occurs twice."""
        if self.rows is not None:
            self._pool._refuse_pending()
            check_rows_differ(rows_on_host(self.rows, range(self.batch)))
            self._pool.is_empty = False  # it may have been cleared
        return self.rows

    def _refuse_pending(self) -> None:
        if self.pending:
            raise ValueError(
                f"pending: got {self.pending} tokens, expected none; commit them first"
            )

    def over(self, rows: Tensor) -> Self:
        """Returns a view of some rows in any order, for an engine that keeps one row for each of its sequences.

        rows: int32 [B], no row twice, on the device of the cache. A negative number means no row: nothing is read or
            written, and the result of `step` is 0. The rows are read at each call, also by a CUDA graph, and may have a
            stride (a column of a block table). A CPU raises then if a row occurs twice.

        `step`, `fill`, `snapshot` and `restore` of the view use these rows. `step`, `fill` and `restore` raise while
        tokens are pending.
        """
        check_tensor(rows, "rows")
        if rows.dim() != 1 or rows.dtype != torch.int32 or rows.device != self.k.device:
            raise TypeError(
                f"rows: got {rows.dtype} of shape {tuple(rows.shape)} on {rows.device}, expected torch.int32 of one "
                f"dimension on {self.k.device}"
            )
        if self.rows is not None or self.pending:
            state = "a view" if self.rows is not None else f"{self.pending} pending tokens"
            raise ValueError(f"rows: got rows of a cache with {state}, expected a cache without")
        self.is_empty = False  # from now on any row may be filled
        view = copy.copy(self)
        view.rows, view._pool = rows, self
        return view

    def clear(self) -> None:
        """Empties every row and drops pending tokens."""
        self._refuse_rows()
        self.counts.zero_()
        self.seen.zero_()
        self.pending = 0
        self.is_empty = True

    def select(self, index: Tensor, *, chunk: int | None = None) -> Self:
        """Returns a cache whose row i is a copy of row index[i], pending tokens included.

        index: integers [rows]; other values raise an error. chunk: the new cache's maximum number of pending tokens, by
        default the maximum of this cache.
        """
        arguments = self._arguments
        index = as_row_indices(index, "index")
        if chunk is not None:
            check_count(chunk, "chunk")
            if chunk < self.pending:
                raise ValueError(
                    f"chunk: got {chunk}, expected {self.pending} or more, the tokens that are pending"
                )
        selected = self._empty_rows(index.shape[0], self.chunk if chunk is None else chunk)
        ops.kv_copy_rows(
            *selected.tensors,
            None,
            *arguments,
            self.pending,
            index,
            self.backend,
        )
        return selected

    def repeat(self, count: int) -> Self:
        """Returns a cache with `count` copies of each row and its pending tokens, as torch.repeat_interleave."""
        check_count(count, "count")
        rows = torch.arange(self.batch, dtype=torch.int32, device=self.k.device)
        return self.select(rows.repeat_interleave(count))

    def reorder(self, index: Tensor) -> None:
        """Replaces row i by row index[i], in place (through a copy), as beam search needs. Pending tokens move along.

        index: integers [B]; other values raise an error.
        """
        self.restore(self.select(as_row_indices(index, "index", self.batch)))

    def snapshot(self) -> Self:
        """Returns a copy for `restore`. Only a copy leads back to an earlier token, because evicted keys do not return.

        The snapshot of a view is a cache of its own. All rows of the view have to exist.
        """
        if self.rows is not None:
            return self._pool.select(self.rows)
        return self.select(torch.arange(self.batch, dtype=torch.int32, device=self.k.device))

    def restore(self, snapshot: SlotMemory) -> None:
        """Copies the content of a snapshot or a view into this cache, in place.

        A snapshot of a single row (a shared prefix) is copied to every row.
        """
        if not isinstance(snapshot, SlotMemory):
            raise TypeError(f"snapshot: got {type(snapshot).__name__}, expected KVSlots")
        if snapshot.rows is not None or snapshot.k is self.k:
            snapshot = snapshot.snapshot()  # a row may be written before it is read
        _check_rule("snapshot", snapshot.rule._asdict(), self.rule)
        for name, got, expected in (
            ("heads_kv", snapshot.heads_kv, self.heads_kv),
            ("head_dim", snapshot.head_dim, self.head_dim),
            ("value_dim", snapshot.value_dim, self.value_dim),
        ):
            if got != expected:
                raise ValueError(f"snapshot: got {name} {got}, expected {expected}")
        if snapshot.k.dtype != self.k.dtype:
            raise TypeError(f"snapshot: got {snapshot.k.dtype}, expected {self.k.dtype}")
        if snapshot.batch not in (1, self.batch):
            raise ValueError(f"snapshot: got {snapshot.batch} rows, expected {self.batch} or one")
        room, limit = (self.chunk, "the chunk") if self.rows is None else (0, "in a view")
        if snapshot.pending > room:
            raise ValueError(
                f"snapshot: got {snapshot.pending} pending tokens, expected at most {room}, {limit}"
            )
        rows = torch.arange(self.batch, dtype=torch.int32, device=self.k.device)
        ops.kv_copy_rows(
            *self.tensors,
            self._checked_rows(),
            *snapshot.tensors,
            *self._rule_arguments,
            snapshot.pending,
            rows if snapshot.batch == self.batch else torch.zeros_like(rows),
            self.backend,
        )
        self.pending, self.is_empty = snapshot.pending, self.rows is None and snapshot.is_empty

    def state_dict(self) -> dict[str, Tensor | int]:
        """Returns the tensors to save. They are not copies."""
        self._refuse_rows()
        numbers = {"pending": self.pending, "is_empty": self.is_empty}
        return dict(zip(_ARRAYS, self.tensors, strict=True)) | self.rule._asdict() | numbers

    def load_state_dict(self, state: Mapping[str, Tensor | int]) -> None:
        """Copies a saved state into the tensors. The saved tensors may have another dtype and device."""
        self._refuse_rows()
        missing = [name for name in (*_ARRAYS, "keep_window_size", "pending") if name not in state]
        if missing:
            raise ValueError(
                f"state: got none of {', '.join(missing)}, expected a state_dict of KVSlots"
            )
        _check_rule("state", state, self.rule)
        for name in _ARRAYS:
            array = getattr(self, name)
            check_tensor(state[name], f"state[{name!r}]")
            if state[name].shape != array.shape:
                raise ValueError(
                    f"state: got {name} of shape {tuple(state[name].shape)}, expected {tuple(array.shape)}"
                )
        self._check_slots(state["pending"])
        check_counts(state["counts"], "state['counts']", self.rule.places_of_heads(self.heads_kv))
        for name in _ARRAYS:
            getattr(self, name).copy_(state[name])
        self.pending, self.is_empty = state["pending"], state.get("is_empty", False)

    def _empty_rows(self, batch: int, chunk: int) -> Self:
        heads = self.heads_kv
        slots = self._shape_of_slots(batch, heads, chunk)
        cache = copy.copy(self)
        # One allocation for each dtype: an engine makes such caches in every layer of a step, and torch.save refuses
        # views of one memory in several dtypes.
        cache.k, cache.v = _make_parts(self.k, *((*slots, t.shape[-1]) for t in (self.k, self.v)))
        cache.scores = self.scores.new_zeros(slots)
        cache.counts, cache.positions, cache.seen = _make_parts(
            self.seen, (batch, heads, _COUNTERS), slots, (batch,)
        )
        return cache


def _make_parts(like: Tensor, *shapes: tuple[int, ...]) -> Sequence[Tensor]:
    """Makes tensors of zeros of these shapes in one allocation."""
    parts = like.new_zeros(sum(map(prod, shapes))).split([*map(prod, shapes)])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _check_rule(name: str, got: Mapping, rule: SelectionRule) -> None:
    for part, expected in rule._asdict().items():
        if part in got and got[part] != expected:
            raise ValueError(f"{name}: got {part} {got[part]}, expected {expected}")
