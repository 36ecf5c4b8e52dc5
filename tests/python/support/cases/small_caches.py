"""Sizes and tokens of KV caches for tests of errors that leave a cache unchanged."""

import re
from contextlib import contextmanager

import pytest
import torch

B, HKV, HQ, D, WINDOW, CHUNK, PLACES = 2, 2, 4, 8, 4, 3, 9

# Bad values of options that steps, chunks and ragged steps share.
BAD_OPTIONS = [
    ("scale: got inf", {"scale": float("inf")}),
    ("scale: got nan", {"scale": float("nan")}),
    ("scale: got 0", {"scale": 0.0}),
    ("softcap: got -1.0", {"softcap": -1.0}),
    ("nonfinite: got 'no'", {"nonfinite": "no"}),
    ("scores_are_bias: got 'False'", {"scores_are_bias": "False"}),
    ("scores_are_bias: got None", {"scores_are_bias": None}),
    ("return_lse: got 'no'", {"return_lse": "no"}),
]


def tokens(n, batch=B):
    k, v = (torch.randn(batch, n, HKV, D) for _ in range(2))
    return {"key": k, "value": v, "scores": torch.randn(batch, HKV, n)}


@contextmanager
def unchanged(cache, message):
    before = [t.clone() for t in cache.tensors], cache.pending, cache.is_empty
    with pytest.raises((ValueError, TypeError, RuntimeError), match=re.escape(message)):
        yield
    after = list(cache.tensors), cache.pending, cache.is_empty
    assert before[1:] == after[1:]
    assert all(map(torch.equal, before[0], after[0]))
