"""The case table that the C++ tests, the Python tests and the check share (tests/cases/attention.csv)."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from ..functional import flash_dmattn_func
from ..keys.intervals import KeyIntervals
from ..keys.select import select_key_intervals
from .oracle import Problem, Result

_INSTALLED = Path(__file__).with_name("attention.csv")
_IN_SOURCE_TREE = Path(__file__).parents[3] / "tests" / "cases" / "attention.csv"
TABLE = _INSTALLED if _INSTALLED.is_file() else _IN_SOURCE_TREE
DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f64": torch.float64,
}

# The words of a column that choose how `_Maker` fills a tensor; the head of the table explains them.
WORDS = {
    "inputs": ("normal", "equal", "extreme", "limits", "zero"),
    "mask_fill": (
        "none", "full", "random", "rows", "padding_left", "padding_right", "blocks", "topk"
    ),
    "bias_fill": (
        "normal", "equal", "large", "low", "all_low", "all_masked", "finfo_min", "inf", "nan"
    ),
    "intervals": (
        "per_query", "global", "sliding", "packed", "prefix", "padding_left", "random", "outside"
    ),
    "rule": ("none", "threshold", "recent", "delayed"),
}  # fmt: skip


def read_table() -> list[dict[str, str]]:
    """Reads all cases. An empty field has the value of the first row, which only holds defaults."""
    with TABLE.open() as file:
        lines = [line for line in file if line.strip() and not line.startswith("#")]
    columns, *rows = ([word.strip() for word in row] for row in csv.reader(lines))
    rows = [dict(zip(columns, row + [""] * len(columns), strict=False)) for row in rows]
    defaults = rows[0]
    return [{key: word or defaults[key] for key, word in row.items()} for row in rows[1:]]


# Cases with a scale of 0 run in C++ only: the Python functions refuse it.
CASES = {row["name"]: row for row in read_table() if row["scale"] != "0"}


def shrink_case(row: dict[str, str]) -> dict[str, str]:
    """Limits a case to 37 queries and 45 keys: two of the smallest tiles and a tail in each dimension."""
    largest = {"seqlen_q": 37, "seqlen_k": 45, "window": 13, "batch": 2}
    return row | {name: str(min(int(row[name]), most)) for name, most in largest.items()}


@dataclass
class Case:
    problem: Problem
    key_intervals: KeyIntervals | None
    nonfinite: str


def make_case(row: dict[str, str]) -> Case:
    """Draws the tensors of a case. The head of the table explains the words."""
    return _Maker(row).case()


def to_device(value, device):
    """Copies a tensor (keeping strides), problem or case to `device`."""
    if isinstance(value, Tensor):
        storage = torch.empty(0, dtype=value.dtype).set_(value.detach().untyped_storage())
        copy = storage.to(device).as_strided(value.shape, value.stride(), value.storage_offset())
        return copy.requires_grad_(value.requires_grad)
    if isinstance(value, KeyIntervals):
        return value.to(device)
    if isinstance(value, (Problem, Case)):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        kinds = (Tensor, KeyIntervals, Problem)
        return replace(
            value, **{n: to_device(p, device) for n, p in parts.items() if isinstance(p, kinds)}
        )
    raise TypeError(type(value).__name__)


def run(case: Case, function=flash_dmattn_func, **options) -> Result:
    """Runs forward and backward of the library. All inputs require gradients."""
    p = case.problem
    q, k, v, bias = (
        t if t is None else t.detach().requires_grad_() for t in (p.q, p.k, p.v, p.bias)
    )
    out, lse = function(
        q,
        k,
        v,
        attn_mask=_in_fewest_dims(p.mask),
        attn_bias=_in_fewest_dims(bias),
        scale=p.scale,
        is_causal=p.causal,
        softcap=p.softcap,
        key_intervals=case.key_intervals,
        nonfinite=case.nonfinite,
        bias_delay=p.bias_delay,
        return_lse=True,
        **options,
    )
    if p.dlse is None or lse is None:
        out.backward(p.dout)
    else:
        torch.autograd.backward((out, lse), (p.dout, p.dlse.to(lse.dtype)))
    return Result(out, lse, q.grad, k.grad, v.grad, None if bias is None else bias.grad)


def _in_fewest_dims(tensor: Tensor | None) -> Tensor | None:
    """Returns a mask or bias as 3-d if it is the same for all queries, and as 2-d if also for all heads."""
    if tensor is None or tensor.shape[2] != 1:
        return tensor
    return tensor[:, 0, 0] if tensor.shape[1] == 1 else tensor[:, :, 0]


class _Maker:
    def __init__(self, row: dict[str, str]):
        self.row = row
        self.generator = torch.Generator().manual_seed(int(row["seed"]))
        names = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "window")
        (self.batch, self.heads_q, self.heads_kv, self.seqlen_q, self.seqlen_k, self.head_dim,
         self.window) = (int(row[name]) for name in names)  # fmt: skip
        self.value_dim = int(row["value_dim"]) or self.head_dim
        self.dtype = DTYPES[row["dtype"]]
        self.causal = row["causal"] == "1"

    def case(self) -> Case:
        row = self.row
        q, k, v, dout = self._inputs()
        intervals = self._intervals() if row["intervals"] != "none" else None
        problem = Problem(
            *(self._lay_out(t, head_dim=2) for t in (q, k, v)),
            dout=self._lay_out(dout, head_dim=None),
            mask=self._lay_out(self._mask(), None) if row["mask"] != "none" else None,
            bias=self._lay_out(self._bias(), None) if row["bias"] != "none" else None,
            shown=None if intervals is None else intervals.to_mask(),
            causal=self.causal,
            scale=None if row["scale"] == "default" else float(row["scale"]),
            softcap=float(row["softcap"]),
            dlse=self._dlse(),  # the last to be drawn
            bias_delay=int(row["bias_delay"]),
        )
        return Case(problem, intervals, row["nonfinite"])

    def _word(self, column: str) -> str:
        word, known = self.row[column], WORDS[column]
        if word not in known:
            raise ValueError(f"{column}: got {word!r}, expected one of {', '.join(known)}")
        return word

    def _normal(self, *shape: int, factor: float = 1.0) -> Tensor:
        return factor * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def _below(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.generator)

    def _shape(self, word: str) -> tuple[int, ...]:
        sizes = {"1": 1, "b": self.batch, "h": self.heads_q, "v": self.heads_kv,
                 "q": self.seqlen_q, "k": self.seqlen_k}  # fmt: skip
        return tuple(sizes[letter] for letter in word)

    def _inputs(self) -> tuple[Tensor, ...]:
        kind = self._word("inputs")
        query = (self.batch, self.seqlen_q, self.heads_q, self.head_dim)
        key = (self.batch, self.seqlen_k, self.heads_kv, self.head_dim)
        value, out = ((*shape[:3], self.value_dim) for shape in (key, query))
        q, k, v, dout = (self._normal(*shape) for shape in (query, key, value, out))
        if kind == "equal":
            k = k[:, :1].expand_as(k)
        elif kind == "extreme":
            q, k = 30 * q, 30 * k
        elif kind == "limits":
            largest = torch.finfo(self.dtype).max
            q, k, v = (largest * (2 * self._uniform(*t.shape) - 1) for t in (q, k, v))
        elif kind == "zero":
            q, k, v = (torch.zeros_like(t) for t in (q, k, v))
        return tuple(t.to(self.dtype) for t in (q, k, v, dout))

    def _dlse(self) -> Tensor | None:
        if self.row["dlse"] == "none":
            return None
        return self._normal(self.batch, self.heads_q, self.seqlen_q)

    def _padding(self) -> Tensor:
        """Returns the number of keys of each batch row that are padding, [B, 1, 1, 1]."""
        return ((torch.arange(self.batch) + 1) * self.seqlen_k // 7)[:, None, None, None]

    def _mask(self) -> Tensor:
        shape = self._shape(self.row["mask"])
        kind = self._word("mask_fill")
        queries = torch.arange(shape[2])[:, None]
        keys = torch.arange(shape[3])
        if kind in ("none", "full"):
            return torch.full(shape, kind == "full")
        if kind in ("random", "rows"):
            mask = self._uniform(*shape) < 0.6
            return mask if kind == "random" else mask & (queries % 3 != 1)
        if kind == "padding_left":
            return (keys >= self._padding()).expand(shape)
        if kind == "padding_right":
            return (keys < self.seqlen_k - self._padding()).expand(shape)
        if kind == "blocks":
            blocks = [(size + 127) // 128 for size in shape[2:]]
            mask = self._uniform(*shape[:2], *blocks) < 0.5
            mask = mask.repeat_interleave(128, 2)[:, :, : shape[2]]
            mask = mask.repeat_interleave(128, 3)[..., : shape[3]].clone()
            mask.view(-1)[self._below(mask.numel(), 1)] = True
            return mask
        chosen = self._below(shape[3], *shape[:3], self.window)  # topk
        return torch.zeros(shape, dtype=torch.bool).scatter_(3, chosen, True)

    def _bias(self) -> Tensor:
        shape = self._shape(self.row["bias"])
        dtype = self.dtype if self.row["bias_dtype"] == "same" else DTYPES[self.row["bias_dtype"]]
        kind = self._word("bias_fill")
        lowest = torch.finfo(dtype).min
        special = {"finfo_min": lowest, "inf": -torch.inf, "nan": torch.nan}
        if kind == "equal":
            return torch.full(shape, 0.5, dtype=dtype)
        if kind == "all_masked":
            return torch.full(shape, lowest, dtype=dtype)
        bias = self._normal(*shape, factor=1000.0 if kind == "large" else 1.0)
        if kind in special:
            return bias.to(dtype).masked_fill(self._uniform(*shape) < 0.3, special[kind])
        if kind == "low":
            chance = self._uniform(*shape)
            for limit, value in ((0.3, -1e29), (0.2, -65504.0), (0.1, -2e4)):
                bias = bias.masked_fill(chance < limit, value)
        elif kind == "all_low":
            bias = bias - 2e4
        return bias.to(dtype)

    def _intervals(self) -> KeyIntervals:
        kind = self._word("intervals")
        batch, heads = self._shape(self.row["intervals_shape"])
        if kind in ("per_query", "global"):
            scores = self._below(64, batch, heads, self.seqlen_k) / 16
            return select_key_intervals(
                scores, **self._rule(), selection=kind, is_causal=self.causal, query_length=self.seqlen_q
            )  # fmt: skip
        shift = self.seqlen_k - self.seqlen_q
        keys = torch.arange(self.seqlen_k).expand(batch, heads, -1)
        first, last = torch.zeros_like(keys), torch.full_like(keys, self.seqlen_q)
        if kind == "sliding":
            first, last = keys - shift, keys + self.window - shift
        elif kind == "packed":
            first = keys // self.window * self.window - shift
            last = first + self.window
        elif kind == "prefix":
            first = torch.where(keys < self.window, 0, keys - shift)
        elif kind == "padding_left":
            last = last * (keys >= self._padding()[..., 0])
        elif kind == "random":
            first = self._below(self.seqlen_q + 1, *keys.shape)
            last = self._below(self.seqlen_q + 1, *keys.shape)
        elif kind == "outside":
            ends = torch.stack([self._end_outside(keys.shape), self._end_outside(keys.shape)], -1)
            return KeyIntervals(ends.int(), self.seqlen_q)
        intervals = torch.stack([first, last], -1).clamp(0, self.seqlen_q)
        return KeyIntervals(intervals.int(), self.seqlen_q)

    def _rule(self) -> dict[str, object]:
        kind = self._word("rule")
        rule = {"keep_window_size": self.window, "recent_window": 24, "sink_tokens": 3}
        if kind == "none":
            return {"keep_window_size": self.window}
        if kind == "threshold":
            return rule | {"keep_window_size": None, "score_threshold": 1.0}
        return rule | {"recent_competes": kind == "recent"}

    def _end_outside(self, shape) -> Tensor:
        """Draws interval ends of which half lie far outside the queries."""
        kind = self._below(6, *shape)
        end = self._below(self.seqlen_q + 1, *shape)
        limits = torch.iinfo(torch.int32)
        end = torch.where(kind == 0, limits.min + end, end)
        end = torch.where(kind == 1, limits.max - end, end)
        return torch.where(kind == 2, -1 - end, end)

    def _lay_out(self, tensor: Tensor, head_dim: int | None) -> Tensor:
        layout = self.row["layout"]
        if layout == "permuted":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "padded":  # the gaps are poisoned
            filler = True if tensor.dtype == torch.bool else torch.nan
            gaps = torch.full([size + 3 for size in tensor.shape], filler, dtype=tensor.dtype)
            view = gaps[tuple(slice(1, size + 1) for size in tensor.shape)]
            return view.copy_(tensor)
        if layout == "gaps":
            size = tensor.shape[-1]
            return torch.nn.functional.pad(tensor, (0, -size % 16))[..., :size]
        if layout == "expanded" and head_dim is not None and tensor.numel():
            return tensor.narrow(head_dim, 0, 1).expand_as(tensor)
        return tensor.contiguous()  # "reversed", too: torch has no negative strides
