"""Learned scores: one number per key. It selects the keys that a query keeps and is added to their attention scores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._core.autograd import is_transformed, score_projection_direct
from ._core.checks import check_count, check_floating, check_tensor, projection_arguments
from ._core.ops import has_kernels_for
from ._core.projection_in_torch import score_projection as score_projection_in_torch
from ._core.score_forms import FORMS, SCALED_FORMS, limit_gradient, score_gradients, score_of


def score_projection(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    form: str = "projection",
    A: Tensor | None = None,
) -> Tensor:
    """Computes the scores of every token, float32 (float64 for float64 hidden): [B, H, S].

    With z = hidden . weight + bias, a score is z, or by the forms of `make_scores`: "gate": log sigmoid(z), "linear":
    A * log(1 + exp(z)), "doge": exp(A * log(1 + exp(z))). "gelu" is for a layer between two projections.

    A score's bits depend on its token's features and its head's weights alone, not on the other tokens: a token gets the
    same score in a prompt, in a chunk of it, in a step, in any batch, and in compiled code. So equal tokens stay equal, and
    of these a query keeps the most recent ones. torch's products round by the number of rows. z has the same bits on CPUs
    and CUDA GPUs.

    Args:
        hidden: [B, S, F], float32, bfloat16, float16 or float64.
        weight: [H, F], of any of these dtypes.
        bias: [H], or None.
        form: "projection", "gelu", "gate", "linear" or "doge".
        A: [H], for the forms "linear" and "doge".
    """
    if form not in FORMS:
        raise ValueError(f"form: got {form!r}, expected one of {', '.join(map(repr, FORMS))}")
    has_factor = form in SCALED_FORMS
    if A is not None and not has_factor:
        raise ValueError(f"A: got a tensor, expected None with form {form!r}")
    weight, bias, A = projection_arguments(hidden, weight, bias, A, has_factor)
    # torch's operators have all derivatives.
    if not torch.compiler.is_compiling() and is_transformed():
        wide = torch.promote_types(hidden.dtype, torch.float32)
        bias = bias if bias is None else bias.to(wide)
        return apply_form(F.linear(hidden.to(wide), weight.to(wide), bias), form, A)
    if has_kernels_for(hidden) and (hidden.dtype != torch.float64 or not hidden.is_cuda):
        return score_projection_direct(hidden, weight, bias, A, form)
    return score_projection_in_torch(hidden, weight, bias, A, form)


class ScoreProjection(nn.Linear):
    """A Linear that projects [B, S, in_features] to [B, S, out_features] by `score_projection`."""

    def forward(self, hidden: Tensor) -> Tensor:
        return score_projection(hidden, self.weight, self.bias).mT


def project_scores(proj: nn.Module, features: Tensor, form: str, A: Tensor | None = None) -> Tensor:
    """Returns the scores [B, H, S] of features [B, S, F], by `score_projection` if proj is a plain Linear.

    A module with hooks, adapters or sharded weights is called.
    """
    if not _is_plain(proj):
        return apply_form(proj(features), form, A)
    return score_projection(features, proj.weight, proj.bias, form=form, A=A)


def weights_of_product(
    v_proj: nn.Module, proj: nn.Module, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None] | None:
    """Returns weight and bias of the Linear that computes proj(v_proj(hidden)), in float32 or wider, for hidden states of
    this dtype. None if one of the modules is not a plain Linear, so that it has to be called.

    torch rounds the values of a token by the number of tokens beside it. Scores of these weights do not.
    """
    if not (_is_plain(v_proj) and _is_plain(proj)):
        return None
    dtype = torch.promote_types(dtype, torch.float32)
    with _without_autocast(proj.weight.device.type):
        own, inner, bias = proj.weight.to(dtype), v_proj.weight.to(dtype), proj.bias
        if v_proj.bias is not None:
            bias = own @ v_proj.bias.to(dtype) + (0 if bias is None else bias)
        return own @ inner, bias


def _is_plain(module: nn.Module) -> bool:
    """Whether calling a module computes a Linear of its parameters and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
             module._backward_pre_hooks)  # fmt: skip
    return (
        type(module) in (nn.Linear, ScoreProjection, _Projection)
        and "forward" not in vars(module)
        and not any(hooks)
        and not is_traceable_wrapper_subclass(module.weight)
    )


def apply_form(step: Tensor, form: str, A: Tensor | None) -> Tensor:
    """Returns the scores [B, H, S] of projections [B, S, H], float32 or wider."""
    if form == "doge":
        return doge_scores_of(A, step)
    return score_of(_widen(step), A, form)


def make_scores(
    features: int,
    heads: int,
    score: str | Callable[[Tensor], Tensor] = "gate",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Makes a module that scores every key: hidden [B, S, features] -> scores [B, heads, S].

        scores = make_scores(512, heads=4)
        bias = scores(hidden)
        out = flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, keep_window_size=1024)

    With z = proj(hidden), a linear projection to one number per head, and s(z) = log(1 + exp(z)):

    - "gate": log sigmoid(z) = -s(-z), from -inf to 0. The bias of proj is initially 3, so that all gates start open, with
      a score near -0.05. A closing gate removes its key from both the selection and the softmax.
    - "linear": A * s(z), with one A per head, initially 0.5.
    - "doge": exp(A * s(z)), with one A per head, initially 0: the form of transformers' Doge, for its checkpoints. It
      grows without bound and seldom learns what to keep (docs/quality.md). Scores are limited to the largest float32, and
      their gradients to 2^64 (docs/numerics.md).
    - a function or module: hidden [B, S, features], widened, -> [B, S, heads].

    The projection and the scores are float32 (float64 for float64 inputs), also under autocast and in a 16-bit module. In
    16 bits hundreds of keys share a value, and rounding decides which are kept. A module that is given for `score` runs
    with autocast off on float32, so its parameters are best float32.

    Args:
        features: the number of features of a token.
        heads: the number of key heads, or of query heads if each of them has its own scores.
        score: "gate", "linear", "doge", or a function.
        device, dtype: device and dtype of the parameters.
    """
    for name, value in (("features", features), ("heads", heads)):
        check_count(value, name)
        if not value:
            raise ValueError(f"{name}: got 0, expected 1 or more")
    check_floating(dtype, "dtype")
    if callable(score):
        return _FunctionScores(features, heads, score)
    if not isinstance(score, str) or score not in _FORMS:
        names = ", ".join(map(repr, _FORMS))
        raise ValueError(f"score: got {score!r}, expected one of {names}, or a function")
    return _FORMS[score](features, heads, device, dtype)


class _Scores(nn.Module):
    """Maps [B, S, features] to [B, heads, S] by `_make_scores`, in float32 or wider."""

    def __init__(self, features: int, heads: int):
        super().__init__()
        self.features, self.heads = features, heads

    def extra_repr(self) -> str:
        return f"features={self.features}, heads={self.heads}"

    def forward(self, hidden: Tensor, projected: tuple[nn.Module, Tensor] | None = None) -> Tensor:
        """Returns the scores of `hidden`. projected: the Linear and the input that `hidden` is the result of, if any."""
        check_tensor(hidden, "hidden")
        if hidden.dim() != 3 or hidden.shape[2] != self.features:
            raise ValueError(
                f"hidden: got shape {tuple(hidden.shape)}, expected [B, S, {self.features}]"
            )
        with _without_autocast(hidden.device.type):
            return self._make_scores(hidden, projected)


def _without_autocast(device_type: str) -> AbstractContextManager:
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()


class _FunctionScores(_Scores):
    def __init__(self, features: int, heads: int, function: Callable[[Tensor], Tensor]):
        super().__init__(features, heads)
        self.function = function

    def _make_scores(self, hidden: Tensor, projected: tuple | None) -> Tensor:
        scores = self.function(hidden.to(torch.promote_types(hidden.dtype, torch.float32)))
        return scores_of_heads(scores, "score", (*hidden.shape[:2], self.heads))


def scores_of_heads(scores: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Transposes a score function's result [B, S, heads] to [B, heads, S] and widens it to float32. Raises for another
    shape or dtype."""
    check_tensor(scores, name)
    if tuple(scores.shape) != shape or not scores.is_floating_point():
        raise ValueError(
            f"{name}: got {scores.dtype} of shape {tuple(scores.shape)}, expected floating numbers [B, S, heads], {shape}"
        )
    return scores.transpose(1, 2).to(torch.promote_types(scores.dtype, torch.float32))


class _Projection(ScoreProjection):
    """A projection whose bias begins at one number, also where it is initialised again after `to_empty`."""

    def __init__(self, features: int, heads: int, first_bias: float, **options):
        self.first_bias = first_bias
        super().__init__(features, heads, **options)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.bias, self.first_bias)


class _ProjectedScores(_Scores):
    """Scores of a form, which are made of a projection [B, S, heads]."""

    first_bias = 0.0
    form: str

    def __init__(self, features: int, heads: int, device, dtype):
        super().__init__(features, heads)
        self.proj = _Projection(features, heads, self.first_bias, device=device, dtype=dtype)
        self.register_parameter("A", None)

    def _make_scores(self, hidden: Tensor, projected: tuple | None) -> Tensor:
        if projected is not None:
            v_proj, source = projected
            weights = weights_of_product(v_proj, self.proj, source.dtype)
            if weights is not None:
                return score_projection(source, *weights, form=self.form, A=self.A)
        return project_scores(self.proj, hidden, self.form, self.A)


class _GateScores(_ProjectedScores):
    form, first_bias = "gate", 3.0  # sigmoid(3) = 0.95


class _ScaledScores(_ProjectedScores):
    """Scores of a projection and a learned factor of each head."""

    first_factor: float

    def __init__(self, features: int, heads: int, device, dtype):
        super().__init__(features, heads, device, dtype)
        self.A = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.A, self.first_factor)


class _LinearScores(_ScaledScores):
    form, first_factor = "linear", 0.5


class _DogeScores(_ScaledScores):
    form, first_factor = "doge", 0.0


_FORMS = {"gate": _GateScores, "linear": _LinearScores, "doge": _DogeScores}


def doge_scores_of(A: Tensor, step: Tensor) -> Tensor:
    """Returns ``exp(A * softplus(step))`` for A [H] and step [B, S, H]: [B, H, S], float32 or wider, under autocast too.

    Scores and gradients are finite for all finite A, step and gradients of scores.
    """
    if torch.is_grad_enabled() and (A.requires_grad or step.requires_grad):
        return _Doge.apply(A, step)
    return _Doge.forward(A, step)


class _Doge(torch.autograd.Function):
    """Computes exp(A * softplus(step)).

    The exponent is clamped to that of the dtype's largest number; a clamped exponent has no gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(A: Tensor, step: Tensor) -> Tensor:
        return score_of(_widen(step), A, "doge")

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        A, step = ctx.saved_tensors
        dz, dfactor = score_gradients(gradient, _widen(step), A, "doge")
        return dfactor, limit_gradient(dz, step.dtype).to(step.dtype).transpose(1, 2)


def _widen(step: Tensor) -> Tensor:
    """Returns [B, H, S], float32 or wider, of step [B, S, H]."""
    dtype = torch.promote_types(step.dtype, torch.float32)
    # In 16 bits the copy that widens also transposes: elementwise kernels over other strides take twice as long.
    return step.transpose(-1, -2).to(dtype, memory_format=torch.contiguous_format)


def bias_to_learn(scores: Tensor) -> Tensor | None:
    """Returns a bias of value 0 through which scores learn that only choose keys, or None if nothing learns.

    The choice has no derivative. A key with a score of -inf is never among the best, so it gets no gradient.
    """
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return None
    return (scores - scores.detach()).nan_to_num()


def with_zero_sum_gradient(scores: Tensor) -> Tensor:
    """Returns the scores [B, H, S] unchanged. Their gradient is centred, so it sums to 0 over the keys.

    Use it for scores that are both trained and a bias in 16 bits, as the layers of this package do: the rounded output of
    attention adds the same error to the gradient of every key of a head. Keys whose gradient is 0 keep it.
    """
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return scores
    return _WithZeroSumGradient.apply(scores)


class _WithZeroSumGradient(torch.autograd.Function):
    """Subtracts the mean over the visible keys of a head from the gradient.

    In 16 bits the gradient has such a common error, because delta = dO . O uses the rounded O. It accumulates in A, which
    all keys share (docs/numerics.md). Gradients of exactly 0 belong to invisible keys and stay 0.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor) -> Tensor:
        return scores.view_as(scores)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        seen = gradient != 0
        # Divided before they are added: a sum of the largest numbers overflows.
        shared = (gradient / seen.sum(-1, keepdim=True)).sum(-1, keepdim=True)
        limit = torch.finfo(gradient.dtype).max
        return torch.where(seen, gradient - shared, gradient).clamp(-limit, limit)
