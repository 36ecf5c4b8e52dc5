"""Errors for arguments of FlashAttention's and torch's functions that ours do not have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P, _R = ParamSpec("_P"), TypeVar("_R")

# The argument of another library -> what to pass here.
_EXPECTED = {
    "q": "query",
    "k": "key",
    "v": "value",
    "causal": "is_causal",
    "window_size": "keep_window_size=0, recent_window=W: the last W keys, the query's own included",
    "alibi_slopes": "forgetting_attention(query, key, value, -alibi_slopes.expand(B, N, Hq))",
    "dropout_p": "no such argument: there is no attention dropout",
    "enable_gqa": "no such argument: the numbers of heads say which are grouped",
}


def check_names(names: object, function: str) -> None:
    """Raises TypeError for the first of the names that belongs to another library."""
    for name in names:
        if name in _EXPECTED:
            raise TypeError(f"{function}: got {name}, expected {_EXPECTED[name]}")


def refuses_foreign_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a function say what to pass instead of an argument that it does not have. Its signature stays the same."""

    @functools.wraps(function)
    def call(*arguments: _P.args, **options: _P.kwargs) -> _R:
        check_names(options, function.__name__)
        return function(*arguments, **options)

    return call
