"""The options of `attend_to_pieces` in normal form, and what the ranks of a group compare of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .._core.availability import unavailable_reason
from .._core.checks import (
    autocast_tensors,
    check_device,
    check_tensor,
    clamp_count,
    resolve_backend,
    resolve_flag,
)
from .._core.kv_checks import check_query
from .._core.numerics import Numerics
from .._dispatch import check_bias_delay
from ..merge import check_sink_logits
from .wire import code_of


class Options(NamedTuple):
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

    @classmethod
    def from_arguments(
        cls, options: Mapping[str, Any] | None, query: Tensor | None
    ) -> Options | None:
        """Makes Options from the options that `begin_exchange` got. Returns None if it got no options."""
        if options is None:
            return None
        if not isinstance(options, Mapping):
            raise TypeError(f"options: got {type(options).__name__}, expected a mapping")
        if query is None:
            raise ValueError(
                "options: got options of attend_to_pieces without query, expected both or none"
            )
        unknown = sorted(options.keys() - set(cls._fields))
        if unknown:
            raise TypeError(
                f"options: got {unknown}, expected arguments of attend_to_pieces: {cls._fields}"
            )
        return cls(**options)

    def check_same(self, begun: Options) -> None:
        """Raises for the first option that `begin_exchange` got differently. A tensor has to be the same object."""
        for name, got, expected in zip(self._fields, self, begun, strict=True):
            if got is expected:
                continue
            if isinstance(got, Tensor) and isinstance(expected, Tensor):
                raise ValueError(
                    f"{name}: got another tensor than begin_exchange, expected the same"
                )
            if isinstance(got, Tensor) or isinstance(expected, Tensor) or got != expected:
                got, expected = (
                    "a tensor" if isinstance(t, Tensor) else t for t in (got, expected)
                )
                raise ValueError(f"{name}: got {got!r}, expected {expected!r} as in begin_exchange")

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

    def compared_numbers(self, query: Tensor) -> dict[str, int]:
        """Returns the numbers that must be equal on all ranks, by the names of the arguments."""
        numerics = self.numerics("saturate").with_scale_for(query.shape[3])
        sink_logits = self.sink_logits
        return {
            "query": query.shape[2],
            "scale": code_of(numerics.scale),
            "softcap": code_of(numerics.softcap),
            "deterministic": int(numerics.deterministic),
            "sink_logits": 0 if sink_logits is None else code_of(sink_logits.dtype),
            "bias_delay": clamp_count(int(self.bias_delay)),
            "zero_sum": int(resolve_flag(self.zero_sum, "zero_sum")),
            "backend": code_of(self.backend),
        }
