"""Dynamic mask attention as a layer: projections, learned scores, and a cache of the window's keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from ._core import ops
from ._core.checks import check_count, check_positions, check_tensor, is_transformed
from ._core.kv_checks import check_mask
from .cache import KVSlots
from .functional import flash_dmattn_func


class DynamicMaskAttention(nn.Module):
    """Causal self-attention in which every query keeps the `keep_window_size` keys with the highest learned scores.

        attention = DynamicMaskAttention(512, heads_q=8, heads_kv=4, keep_window_size=1024, rope=rope)
        out = attention(hidden)                         # training: [B, S, 512] -> [B, S, 512]

        cache = attention.make_cache(batch=1)           # generation, under torch.no_grad()
        out = attention(prompt, cache=cache)
        out = attention(token, cache=cache)             # [B, 1, 512], at any length in the same time and memory

    The score of a key is ``exp(A * softplus(dt_proj(values)))``, float32 in every precision, and is added to its
    attention scores, so that A and dt_proj learn. A is 0 at first: all scores are equal then, which keeps the most recent
    keys. Scores end at the largest float32, and the factor exp(...) of their gradient at 2^46 (docs/numerics.md).

    Args:
        hidden_size: features of input and output.
        heads_q: query heads.
        heads_kv: key and value heads, by default heads_q.
        keep_window_size: the number of keys that a query keeps.
        head_dim: up to 256; by default hidden_size / heads_q.
        bias: whether the projections have one.
        rope: (query [B, S, heads_q, D], key [B, S, heads_kv, D], positions int64 [B or 1, S]) -> (query, key): a rotary
            embedding, or whatever else happens to queries and keys.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        heads_q: int,
        heads_kv: int | None = None,
        keep_window_size: int = 2048,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        rope: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        heads_kv = heads_q if heads_kv is None else heads_kv
        sizes = {
            "hidden_size": hidden_size,
            "heads_q": heads_q,
            "heads_kv": heads_kv,
            "keep_window_size": keep_window_size,
        }
        for name, value in sizes.items():
            check_count(value, name)
            if not value:
                raise ValueError(f"{name}: got 0, expected 1 or more")
        if heads_q % heads_kv:
            raise ValueError(f"heads_q: got {heads_q}, expected a multiple of heads_kv, {heads_kv}")
        if head_dim is None:
            if hidden_size % heads_q:
                raise ValueError(
                    f"hidden_size: got {hidden_size}, expected a multiple of heads_q, {heads_q}, where head_dim is not given"
                )
            head_dim = hidden_size // heads_q
        check_count(head_dim, "head_dim")
        if not 1 <= head_dim <= 256:
            raise ValueError(f"head_dim: got {head_dim}, expected 1 to 256")
        if rope is not None and not callable(rope):
            raise TypeError(f"rope: got {type(rope).__name__}, expected a function or None")
        self.heads_q, self.heads_kv, self.head_dim = heads_q, heads_kv, head_dim
        self.hidden_size, self.keep_window_size, self.rope = hidden_size, keep_window_size, rope
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, heads_q * head_dim, **options)
        self.k_proj = nn.Linear(hidden_size, heads_kv * head_dim, **options)
        self.v_proj = nn.Linear(hidden_size, heads_kv * head_dim, **options)
        self.dt_proj = nn.Linear(heads_kv * head_dim, heads_kv, **options)
        self.A = nn.Parameter(torch.zeros(heads_kv, device=device, dtype=dtype))
        self.o_proj = nn.Linear(heads_q * head_dim, hidden_size, **options)

    def extra_repr(self) -> str:
        return (
            f"heads_q={self.heads_q}, heads_kv={self.heads_kv}, head_dim={self.head_dim}, "
            f"keep_window_size={self.keep_window_size}"
        )

    def make_cache(
        self, batch: int, *, chunk: int = 128, dtype: torch.dtype | None = None
    ) -> KVSlots:
        """An empty cache for generation.

        chunk: after the prompt, so many tokens at a time are attended to together.
        dtype: of keys and values; by default that of the weights. Under torch.autocast give its dtype.
        """
        weight = self.k_proj.weight
        return KVSlots(
            batch, self.heads_kv, self.keep_window_size, self.head_dim,
            chunk=chunk, dtype=weight.dtype if dtype is None else dtype, device=weight.device,
        )  # fmt: skip

    def forward(
        self,
        hidden: Tensor,
        *,
        cache: KVSlots | None = None,
        key_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            hidden: [B, S, hidden_size].
            cache: see `make_cache`. A prompt comes first, then tokens one by one or several at a time; there is no
                gradient through it.
            key_mask: bool [B, S], False for padding; None: there is none.
            positions: integers [B or 1, S], for `rope`; by default tokens are counted, padding included.

        Returns:
            [B, S, hidden_size].
        """
        self._check(hidden, cache, key_mask)
        _check_positions(positions, hidden)
        batch, length, _ = hidden.shape
        query = self.q_proj(hidden).view(batch, length, self.heads_q, self.head_dim)
        key, value = (
            project(hidden).view(batch, length, self.heads_kv, self.head_dim)
            for project in (self.k_proj, self.v_proj)
        )
        scores = scores_of(self.A, self.dt_proj(value.flatten(2)))
        if self.rope is not None:
            query, key = self.rope(query, key, self._positions(length, cache, positions, hidden))
        dtype = value.dtype
        if cache is not None:
            query, key, value = (t.to(cache.k.dtype) for t in (query, key, value))
            if not cache.is_empty:
                out = cache.extend(query, key, value, scores, key_mask=key_mask)
                return self.o_proj(out.flatten(2).to(dtype))
        out = flash_dmattn_func(
            query,
            key,
            value,
            attn_mask=key_mask,
            attn_bias=with_zero_sum_gradient(scores),
            is_causal=True,
            keep_window_size=self.keep_window_size,
        )
        if cache is not None:
            with torch.no_grad():
                cache.fill(key, value, scores, key_mask=key_mask)
        return self.o_proj(out.flatten(2).to(dtype))

    def _check(self, hidden: Tensor, cache: KVSlots | None, key_mask: Tensor | None) -> None:
        check_tensor(hidden, "hidden")
        if hidden.dim() != 3 or hidden.shape[2] != self.hidden_size:
            raise ValueError(
                f"hidden: got shape {tuple(hidden.shape)}, expected [B, S, {self.hidden_size}]"
            )
        if key_mask is not None:
            check_mask(key_mask, tuple(hidden.shape[:2]), hidden.device)
        if cache is None:
            return
        if not isinstance(cache, KVSlots):
            raise TypeError(f"cache: got {type(cache).__name__}, expected KVSlots (make_cache)")
        got = (cache.batch, cache.k.shape[1], cache.keep_window_size, cache.k.shape[3])
        expected = (hidden.shape[0], self.heads_kv, self.keep_window_size, self.head_dim)
        if got != expected:
            raise ValueError(
                f"cache: got one of (batch, heads_kv, keep_window_size, head_dim) {got}, expected {expected}"
            )

    def _positions(
        self, length: int, cache: KVSlots | None, positions: Tensor | None, hidden: Tensor
    ) -> Tensor:
        if positions is not None:
            return positions
        counted = torch.arange(length, device=hidden.device)[None]
        return counted if cache is None else counted + cache.seen[:, None] + cache.pending


def _check_positions(positions: Tensor | None, hidden: Tensor) -> None:
    if positions is None:
        return
    check_positions(positions, "positions")
    batch, length, _ = hidden.shape
    if positions.shape not in ((1, length), (batch, length)):
        raise ValueError(
            f"positions: got shape {tuple(positions.shape)}, expected [B or 1, S] of hidden, ({batch}, {length})"
        )


# The largest factor exp(x) in the gradient of a score. A score above 2^24 leaves query . key no bits of float32, so that
# attention sees the key with the highest score alone; the square of 2^46, of which Adam keeps sums, is 2^92.
_LARGEST_FACTOR = 2.0**46


def scores_of(A: Tensor, step: Tensor) -> Tensor:
    """``exp(A * softplus(step))`` for A [H] and step [B, S, H]: [B, H, S], float32 or wider, under autocast too.

    In 16 bits hundreds of keys share a few values, and rounding decides which of them are kept. An exponent beyond that
    of the dtype's largest number counts as this one.
    """
    wide = torch.promote_types(step.dtype, torch.float32)
    # In 16 bits the copy that widens also transposes: elementwise kernels over other strides take twice as long.
    step = step.transpose(-1, -2).to(wide, memory_format=torch.contiguous_format)
    info = torch.finfo(wide)
    # Half a unit of rounding below the exponent of the largest number, whose exp may round to inf.
    largest = math.log(info.max) * (1 - info.eps / 2)
    exponent = (A.to(wide)[:, None] * F.softplus(step)).clamp(max=largest)
    if torch.is_grad_enabled() and exponent.requires_grad:
        return _Exp.apply(exponent)
    return exponent.exp()


class _Exp(torch.autograd.Function):
    """exp, in whose gradient the factor exp(x) ends at `_LARGEST_FACTOR`: times the gradient of a score it would leave float32
    long before the score does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(exponent: Tensor) -> Tensor:
        return exponent.exp()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (scores,) = ctx.saved_tensors
        return gradient * scores.clamp(max=_LARGEST_FACTOR)


def with_zero_sum_gradient(scores: Tensor) -> Tensor:
    """The scores of all keys, [B, H, S]. Their gradient sums to 0, as that of a softmax's input does."""
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return scores
    return _WithZeroSumGradient.apply(scores)


class _WithZeroSumGradient(torch.autograd.Function):
    """In 16 bits the gradient's error has a part that all keys of a head share: attention takes delta = dO . O from the
    rounded O. It adds up in A, one number for all of them (docs/numerics.md). A gradient of 0 is that of an invisible
    key, which stays."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor) -> Tensor:
        return scores.view_as(scores)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        if _takes_one_kernel(gradient):
            return ops.zero_sum(gradient)
        seen = gradient != 0
        # Divided before they are added: a sum of the largest numbers overflows.
        shared = (gradient / seen.sum(-1, keepdim=True)).sum(-1, keepdim=True)
        limit = torch.finfo(gradient.dtype).max
        return torch.where(seen, gradient - shared, gradient).clamp(-limit, limit)


def _takes_one_kernel(gradient: Tensor) -> bool:
    """Whether the operator zero_sum may replace torch's seven kernels: not under torch.compile, which fuses them, and not
    where autograd, torch.func, forward mode or a subclass of tensors has to see torch's operators."""
    return (
        not is_compiling()
        and type(gradient) is Tensor
        and gradient.is_cuda
        and gradient.dtype == torch.float32
        and not gradient.requires_grad
        and not is_transformed()
        and ops.has_kernels_for(gradient)
    )
