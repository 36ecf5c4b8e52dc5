"""Derivatives of the operators; importing this module registers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack as _innermost_transform
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import torch_registrations
from .load import NAMESPACE
from .ops import (
    BACKWARD,
    FORWARD,
    SELECT_AND_ATTEND,
    backward,
    forward,
    score_projection,
    select_and_attend,
)
from .score_forms import score_gradients
from .signatures import GRADIENTS, Signature

# Error texts for unsupported derivatives. The caller prefixes the package's or the argument's name.
NO_TANGENT = (
    "got a tensor with a tangent (forward-mode differentiation, torch.func.jvp), expected one without: attention has "
    "reverse-mode derivatives only"
)
NO_FUNCTIONAL_GRADIENT = (
    "got a tensor of torch.func.grad, vjp, jacrev or hessian, which attention does not support; expected an ordinary "
    "one: use torch.autograd.grad or backward()"
)
NO_SECOND_DERIVATIVE = (
    "create_graph: got True, expected False: attention has first derivatives only. Use torch's math attention for double "
    "backward"
)

NO_TRANSFORM = (
    "got a call under a transform of torch.func (vmap, for one), expected none: context parallelism exchanges keys of "
    "ordinary tensors"
)

# The inputs of backward, without the need_* flags: dout, the tensors and results of forward, dlse, and forward's
# options.
_BACKWARD_INPUTS = ("dout", *FORWARD.tensors, *FORWARD.results, "dlse", *FORWARD.options)
assert BACKWARD.arguments == (*_BACKWARD_INPUTS, *(f"need_{name}" for name in GRADIENTS.values()))

# torch.library.register_autograd would do the same but take 90 µs more in each call: it fills in defaults by the schema
# and passes through the dispatcher twice.


class _Attention(torch.autograd.Function):
    """The operator `forward` with its first derivative."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            results = forward(*inputs)
        return save_for_backward(ctx, FORWARD, inputs, results)

    @staticmethod
    def backward(ctx, dout, dstatistics):
        if dout is None and dstatistics is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        dout, dlse = _row_gradients(FORWARD, saved, dout, dstatistics)
        arguments = (dout, *saved, dlse, *ctx.options)
        return _input_gradients(ctx, FORWARD, arguments)


class _SelectAndAttend(torch.autograd.Function):
    """The operator `select_and_attend` with the first derivative of `forward`: the choice of keys has no derivative."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            results = select_and_attend(*inputs)
        return save_for_backward(ctx, SELECT_AND_ATTEND, inputs, results)

    @staticmethod
    def backward(ctx, dout, dstatistics, _):
        if dout is None and dstatistics is None:
            return (None,) * len(ctx.needs_input_grad)
        signature, saved = SELECT_AND_ATTEND, ctx.saved_tensors
        named = saved_by_name(signature, saved, ctx.options)
        dout, dlse = _row_gradients(signature, saved, dout, dstatistics)
        bound = (named["window"], int(named["is_causal"]))
        # Intervals include causality.
        named |= {"dout": dout, "dlse": dlse, "key_bound": bound, "is_causal": False}
        return _input_gradients(ctx, signature, tuple(map(named.get, _BACKWARD_INPUTS)))


def save_for_backward(
    ctx, signature: Signature, inputs: tuple, results: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Saves the inputs and results of an operator for backward, and returns the results.

    Of the results, only out and lse have a derivative. The tensors come first among an operator's arguments.
    """
    tensors = len(inputs) - len(signature.options)
    ctx.save_for_backward(*inputs[:tensors], *results)
    ctx.options = inputs[tensors:]
    ctx.mark_non_differentiable(*results[2:])
    ctx.set_materialize_grads(False)
    return results


def saved_by_name(
    signature: Signature, tensors: Sequence[Tensor | None], options: tuple
) -> dict[str, object]:
    """Returns the values that save_for_backward has saved, by name.

    tensors: ctx.saved_tensors, passed in because checkpointing lets a backward read it only once. options: ctx.options.
    """
    return dict(zip(signature.saved, (*tensors, *options), strict=True))


def _row_gradients(
    signature: Signature,
    tensors: Sequence[Tensor | None],
    dout: Tensor | None,
    dstatistics: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns dout and the gradient of lse. lse is the first of the statistics."""
    if dout is None:
        named = dict(zip(signature.saved, tensors, strict=False))
        q, v = named["q"], named["v"]
        dout = q.new_zeros((*q.shape[:3], v.shape[3]))
    return dout, None if dstatistics is None else dstatistics[0]


def _input_gradients(ctx, signature: Signature, arguments: tuple) -> tuple[Tensor | None, ...]:
    """Calls backward and returns the gradient of each input of an operator, or None if the input needs no gradient."""
    needed = tuple(ctx.needs_input_grad[i] for i in signature.differentiable)
    if torch.is_grad_enabled():  # create_graph
        gradients = backward(*arguments, *needed)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            gradients = backward(*arguments, *needed)
    return gradients_of_inputs(ctx, signature, gradients, needed)


def gradients_of_inputs(
    ctx, signature: Signature, gradients: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Orders the results of an operator's backward by its arguments; None for arguments that need no gradient."""
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for i, gradient, is_needed in zip(signature.differentiable, gradients, needed, strict=True):
        result[i] = gradient if is_needed else None
    return tuple(result)


class _Gradients(torch.autograd.Function):
    """The operator `backward`, which has no derivative of its own."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return backward(*inputs)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


class _ScoreProjection(torch.autograd.Function):
    """The operator `score_projection`. Its derivatives are made of torch's operators, which have derivatives of their own."""

    @staticmethod
    def forward(ctx, *inputs):
        save_projection(ctx, inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return score_projection(*inputs)

    @staticmethod
    def backward(ctx, dscores):
        return projection_gradients(ctx, score_projection, dscores)


def save_projection(ctx, inputs: tuple) -> None:
    """Saves hidden, weight, bias, factor and form for projection_gradients."""
    *tensors, ctx.form = inputs
    ctx.save_for_backward(*tensors)


def projection_gradients(ctx, project: Callable, dscores: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the arguments of `project`, from sums in the dtype of dscores [B, H, S].

    Projections are computed again, because they are as large as the scores but are needed only here.
    """
    hidden, weight, bias, factor = ctx.saved_tensors
    needed, dtype = ctx.needs_input_grad, dscores.dtype
    dhidden = dweight = dbias = None
    with torch.autocast(dscores.device.type, enabled=False):
        z = (
            dscores
            if ctx.form == "projection"
            else project(hidden, weight, bias, None, "projection")
        )
        dz, dfactor = score_gradients(dscores, z, factor, ctx.form)
        if needed[0]:
            dhidden = (dz.mT @ weight.to(dtype)).to(hidden.dtype)
        if needed[1]:
            dweight = (dz @ hidden.to(dtype)).sum(0).to(weight.dtype)
        if needed[2]:
            dbias = dz.sum((0, 2)).to(bias.dtype)
    return dhidden, dweight, dbias, dfactor, None


def _with_autograd(operator, function: type[torch.autograd.Function]):
    def call(*inputs):
        _check_tangents(inputs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(f"flash_dmattn: {NO_FUNCTIONAL_GRADIENT}")
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    return call


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active."""
    return _innermost_transform() is not None or forward_ad._current_level >= 0


def _check_tangents(inputs: tuple) -> None:
    """Raises for inputs with tangents: torch would silently make their derivative 0.

    Public functions check earlier and name the argument. This check covers compiled calls and operators.
    """
    if forward_ad._current_level < 0:
        return
    for value in inputs:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(f"flash_dmattn: {NO_TANGENT}")


def _bypass_dispatcher(operator, function: type[torch.autograd.Function]):
    """Returns `operator` with the derivative `function`.

    Unless something traces or transforms the call, it does not pass through the dispatcher, which saves 10 µs of 25.
    """

    def call(*inputs):
        if is_compiling() or is_transformed():
            return operator(*inputs)
        torch_registrations.register()
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    return call


_autograd = torch.library.Library(NAMESPACE, "FRAGMENT")
_autograd.impl("forward", _with_autograd(forward, _Attention), "Autograd")
_autograd.impl("select_and_attend", _with_autograd(select_and_attend, _SelectAndAttend), "Autograd")
_autograd.impl("backward", _with_autograd(backward, _Gradients), "Autograd")
_autograd.impl("score_projection", _with_autograd(score_projection, _ScoreProjection), "Autograd")

forward_direct = _bypass_dispatcher(forward, _Attention)
select_and_attend_direct = _bypass_dispatcher(select_and_attend, _SelectAndAttend)
score_projection_direct = _bypass_dispatcher(score_projection, _ScoreProjection)
