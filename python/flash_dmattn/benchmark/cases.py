"""The measured work: rows of cases, by name."""

from __future__ import annotations

import dataclasses

DENSE, PER_QUERY, GLOBAL, SLIDING = "dense causal", "per_query", "global", "sliding"
DOCUMENTS, DENSE_MASKS = "documents", "dense_masks"
OLD_NAMES = {"pairs": DENSE_MASKS}  # of kinds and cases in records


@dataclasses.dataclass(frozen=True)
class Case:
    """Causal attention of `batch` sequences.

    kind: DENSE; PER_QUERY and GLOBAL: of every query the `window` keys with the highest bias, one bias per
        key; SLIDING: the last `window` keys; DOCUMENTS: packed documents of `window` tokens each; DENSE_MASKS:
        a dense mask and bias, about `window` random keys of those a query may see.
    """

    kind: str
    seqlen: int
    head_dim: int
    window: int | None = None  # None where dense
    heads_q: int = 8
    heads_kv: int = 8
    batch: int = 1

    def __str__(self) -> str:
        heads = f"H{self.heads_q}" + (
            f" Hkv{self.heads_kv}" if self.heads_kv != self.heads_q else ""
        )
        window = f" w{self.window}" if self.window else ""
        return f"{self.kind} B{self.batch} {heads} N{self.seqlen} D{self.head_dim}{window}"

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of all heads: query i sees min(i + 1, window) keys."""
        n, w = self.seqlen, min(self.window or self.seqlen, self.seqlen)
        first = w * (w + 1) // 2
        later = (n // w - 1) * first if self.kind == DOCUMENTS else (n - w) * w
        return self.batch * self.heads_q * (first + later)

    def useful_flops(self, direction: str) -> int:
        """2 products of 2 D flops a (query, key) pair forward, 5 backward."""
        return {"forward": 4, "backward": 10}[direction] * self.head_dim * self.pairs


def _sweep(lengths, windows, **rest) -> list[Case]:
    return [Case(PER_QUERY, n, window=w, **rest) for n in lengths for w in windows]


_GPU_HEADS = {"heads_q": 16, "heads_kv": 8, "head_dim": 128}
# {device type: {name: cases}}
CASES = {
    "cpu": {
        "dense": [Case(DENSE, 4096, 128)],
        "dma": [Case(PER_QUERY, 8192, 64, 1024)],
        "scaling": _sweep((4096, 8192, 16384, 32768, 65536), (1024,), head_dim=64),
        "windows": _sweep((8192,), (128, 256, 512, 1024, 2048, 4096), head_dim=64),
        "global": [Case(GLOBAL, 8192, 64, 1024)],
        "sliding": [Case(SLIDING, 8192, 64, 1024)],
        "dense_masks": [Case(DENSE_MASKS, 4096, 64, 512, heads_q=2, heads_kv=1)],
    },
    "cuda": {
        "dense": [Case(DENSE, n, 128, heads_q=16, heads_kv=16) for n in (8192, 32768)],
        "head_dims": [Case(DENSE, 32768, d, heads_q=16, heads_kv=16) for d in (64, 256)],
        "dma": _sweep((32768,), (2048,), **_GPU_HEADS),
        "groups": [
            Case(PER_QUERY, 32768, 128, 2048, heads_q=16, heads_kv=16),
            Case(PER_QUERY, 32768, 128, 2048, heads_q=16, heads_kv=2),
            Case(PER_QUERY, 4096, 128, 2048, heads_q=32, heads_kv=32, batch=2),
            Case(PER_QUERY, 32768, 64, 1024, heads_q=16, heads_kv=8),
            Case(PER_QUERY, 131072, window=2048, **_GPU_HEADS),
        ],
        "scaling": _sweep((4096, 8192, 16384, 32768, 65536), (2048,), **_GPU_HEADS),
        "windows": _sweep((32768,), (256, 512, 1024, 2048, 4096, 8192), **_GPU_HEADS),
        "global": [Case(GLOBAL, 32768, window=2048, **_GPU_HEADS)],
        "sliding": [Case(SLIDING, 32768, window=2048, **_GPU_HEADS)],
        "documents": [
            Case(DOCUMENTS, 32768, window=2048, **_GPU_HEADS),
            Case(DENSE, 2048, heads_q=16, heads_kv=8, head_dim=128, batch=16),
        ],
        "dense_masks": [
            Case(DENSE_MASKS, 32768, 64, 1024, heads_q=2, heads_kv=1),
            Case(DENSE_MASKS, 4096, 128, 2048),
        ],
    },
}
NAMES = tuple(dict.fromkeys(name for table in CASES.values() for name in table))


def cases_of(
    device: str,
    names: list[str],
    seqlens: list[int] | None = None,
    windows: list[int] | None = None,
) -> list[Case]:
    """The cases of these names, each once; `seqlens` and `windows` replace their own."""
    found = [case for name in names for case in CASES[device].get(OLD_NAMES.get(name, name), [])]
    if seqlens:
        found = [dataclasses.replace(case, seqlen=n) for case in found for n in seqlens]
    if windows:
        found = [
            dataclasses.replace(case, window=w) if case.window else case
            for case in found
            for w in windows
        ]
    return list(dict.fromkeys(found))
