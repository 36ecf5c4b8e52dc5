"""Sizes and tokens of KV caches for tests of errors that leave a cache unchanged."""

import re
from contextlib import contextmanager

import pytest
import torch

B, HKV, HQ, D, WINDOW, CHUNK = 2, 2, 4, 8, 4, 3


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
