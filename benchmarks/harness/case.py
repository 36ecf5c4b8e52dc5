"""A case of attention: its sizes, its title and its useful work; and the cases by name."""

from __future__ import annotations

import dataclasses
import re
import statistics

import numpy as np

from .record import Row

DENSE, PER_QUERY, GLOBAL, SLIDING = "dense causal", "per_query", "global", "sliding"
DOCUMENTS, DENSE_MASKS, EVICTED = "documents", "dense_masks", "evicted"
PREFIX, WINDOWED_DOCUMENTS = "prefix", "windowed_documents"
KINDS = (DENSE, PER_QUERY, GLOBAL, SLIDING, DOCUMENTS, DENSE_MASKS, EVICTED, PREFIX, WINDOWED_DOCUMENTS)  # fmt: skip
RECENT = 512  # the recent window of EVICTED
KEPT = 1 / 8  # share of the older keys that EVICTED keeps without a window
# A normally distributed score exceeds it with probability KEPT.
THRESHOLD = -statistics.NormalDist().inv_cdf(KEPT)
_TITLE = re.compile(
    rf"({'|'.join(KINDS)}) B(\d+) H(\d+)(?: Hkv(\d+))? N(\d+) D(\d+)(?:/(\d+))?(?: w(\d+))?"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Causal attention of `batch` sequences.

    The kinds:
        DENSE: a query sees every earlier key.
        PER_QUERY: a query sees the `window` earlier keys with the highest bias, one bias per key.
        GLOBAL: a query sees those of the row's `window` keys with the highest bias that are not later than itself.
        SLIDING: a query sees the last `window` keys.
        DOCUMENTS: packed documents of `window` tokens each.
        DENSE_MASKS: a dense mask and a dense bias, with about `window` random keys per query.
        EVICTED: a query sees the last RECENT keys and some of the older ones. With a window, these are the `window` keys with
            the highest scores; without one, the keys whose score exceeds THRESHOLD, a share KEPT of them.
        PREFIX: a query sees the first `window` keys, later ones too, and every earlier key.
        WINDOWED_DOCUMENTS: packed documents of 4 `window` tokens each, in which a query sees the last `window` keys.
    """

    kind: str
    seqlen: int
    head_dim: int
    window: int | None = None
    heads_q: int = 8
    heads_kv: int = 8
    batch: int = 1
    value_dim: int | None = None  # None: head_dim

    def __str__(self) -> str:
        heads = f"H{self.heads_q}" + f" Hkv{self.heads_kv}" * (self.heads_kv != self.heads_q)
        window = f" w{self.window}" if self.window else ""
        values = f"/{self.value_dim}" if self.value_dim else ""
        return f"{self.kind} B{self.batch} {heads} N{self.seqlen} D{self.head_dim}{values}{window}"

    @classmethod
    def parse(cls, title: str) -> Case | None:
        """Returns the case with this title, or None if the title is not that of an attention case."""
        match = _TITLE.fullmatch(title)
        if match is None:
            return None
        batch, heads_q, heads_kv, seqlen, head_dim, value_dim, window = (
            number and int(number) for number in match.groups()[1:]
        )
        heads_kv = heads_kv or heads_q
        return cls(match[1], seqlen, head_dim, window, heads_q, heads_kv, batch, value_dim)

    @property
    def document_length(self) -> int | None:
        """Returns the number of tokens of a packed document; None if the sequence is one."""
        return {DOCUMENTS: self.window, WINDOWED_DOCUMENTS: 4 * (self.window or 0)}.get(self.kind)

    @property
    def visible_elements(self) -> int:
        """Returns the number of visible (query, key) elements of all heads, for random scores on average."""
        return round(self.batch * self.heads_q * self._keys_of_queries().sum().item())

    def _keys_of_queries(self) -> np.ndarray:
        """Returns how many keys each query of a sequence sees, float64 [N]."""
        n, window = self.seqlen, self.window or self.seqlen
        earlier = np.arange(1, n + 1, dtype=np.float64)  # the query's own key included
        if self.kind == PREFIX:
            return np.maximum(earlier, window)
        if length := self.document_length:
            return np.minimum((earlier - 1) % length + 1, window)
        if self.kind == GLOBAL:  # the best keys of a row are anywhere in it
            return earlier * min(window / n, 1)
        if self.kind == EVICTED:
            recent = np.minimum(earlier, RECENT)
            older = earlier - recent
            return recent + (np.minimum(older, window) if self.window else KEPT * older)
        return np.minimum(earlier, window)

    def useful_flops(self, direction: str) -> int:
        """Counts 2 D FLOPs per visible element and product. Forward has one product over the key dimension and one over the value
        dimension; backward has three and two."""
        with_keys, with_values = {"forward": (1, 1), "backward": (3, 2)}[direction]
        terms = with_keys * self.head_dim + with_values * (self.value_dim or self.head_dim)
        return 2 * terms * self.visible_elements


def _sweep(lengths, windows, **rest) -> list[Case]:
    return [Case(PER_QUERY, n, window=w, **rest) for n in lengths for w in windows]


_LENGTHS = (4096, 8192, 16384, 32768, 65536)
_GPU_HEADS = {"heads_q": 16, "heads_kv": 8, "head_dim": 128}
# {device type: {name: cases}}
CASES = {
    "cpu": {
        "dense": [Case(DENSE, 4096, 128)],
        "dynamic_mask": [Case(PER_QUERY, 8192, 64, 1024)],
        "scaling": _sweep(_LENGTHS, (1024,), head_dim=64),
        "windows": _sweep((8192,), (128, 256, 512, 1024, 2048, 4096), head_dim=64),
        "global": [Case(GLOBAL, 8192, 64, 1024)],
        "sliding": [Case(SLIDING, 8192, 64, 1024)],
        "dense_masks": [Case(DENSE_MASKS, 4096, 64, 512, heads_q=2, heads_kv=1)],
    },
    "cuda": {
        "dense": [Case(DENSE, n, 128, heads_q=16, heads_kv=16) for n in (8192, 32768)],
        "head_dims": [
            *(Case(DENSE, 32768, d, heads_q=16, heads_kv=16) for d in (64, 256)),
            *(Case(DENSE, 16384, d, heads_q=16, heads_kv=16) for d in (96, 192, 256)),
            *(Case(PER_QUERY, 16384, d, 1024, heads_q=16, heads_kv=8) for d in (96, 192, 256)),
            Case(DENSE, 16384, 192, heads_q=16, heads_kv=16, value_dim=128),
            Case(PER_QUERY, 16384, 192, 1024, heads_q=16, heads_kv=8, value_dim=128),
        ],
        "dynamic_mask": _sweep((32768,), (2048,), **_GPU_HEADS),
        "groups": [
            Case(PER_QUERY, 32768, 128, 2048, heads_q=16, heads_kv=16),
            Case(PER_QUERY, 32768, 128, 2048, heads_q=16, heads_kv=2),
            Case(PER_QUERY, 4096, 128, 2048, heads_q=32, heads_kv=32, batch=2),
            Case(PER_QUERY, 32768, 64, 1024, heads_q=16, heads_kv=8),
            Case(PER_QUERY, 131072, window=2048, **_GPU_HEADS),
        ],
        "scaling": _sweep(_LENGTHS, (2048,), **_GPU_HEADS),
        "windows": _sweep((32768,), (256, 512, 1024, 2048, 4096, 8192), **_GPU_HEADS),
        "global": [Case(GLOBAL, 32768, window=2048, **_GPU_HEADS)],
        "sliding": [Case(SLIDING, 32768, window=2048, **_GPU_HEADS)],
        "documents": [
            Case(DOCUMENTS, 32768, window=2048, **_GPU_HEADS),
            Case(DENSE, 2048, heads_q=16, heads_kv=8, head_dim=128, batch=16),
            Case(WINDOWED_DOCUMENTS, 32768, window=2048, **_GPU_HEADS),
        ],
        "prefix": [Case(PREFIX, 32768, window=8192, **_GPU_HEADS)],
        "dense_masks": [
            Case(DENSE_MASKS, 32768, 64, 1024, heads_q=2, heads_kv=1),
            Case(DENSE_MASKS, 4096, 128, 2048),
        ],
        "evicted": [
            Case(EVICTED, n, window=w, **_GPU_HEADS)
            for w in (None, 2048)
            for n in (*_LENGTHS, 131072)
        ],
    },
}
NAMES = tuple(CASES["cuda"])


def cases_of(device: str, names: list[str], lengths=None, windows=None) -> list[Case]:
    """Returns the cases of the names, each once. `lengths` and `windows`, where given, replace those of the cases."""
    cases = [
        dataclasses.replace(case, seqlen=n, window=w)
        for name in names
        for case in CASES[device].get(name, [])
        for n in lengths or [case.seqlen]
        for w in (windows if windows and case.window else [case.window])
    ]
    return list(dict.fromkeys(cases))


def useful_tflops(row: Row) -> dict[str, float]:
    """Returns a row's useful TFLOP/s by direction; none for a row that does not measure attention."""
    case = Case.parse(row.case)
    ways = [way for way in ("forward", "backward") if case and way in row.ms]
    return {way: case.useful_flops(way) / row.ms[way] * 1e-9 for way in ways}
