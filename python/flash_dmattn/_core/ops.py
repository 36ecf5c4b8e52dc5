"""The C++ operators: loading, shape inference, derivatives."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .operators import GRADIENTS, Signature

_PACKAGE = __package__.rpartition(".")[0]  # which may have another name than ours


def _load_library() -> str:
    """Loads _C.so of this package, or the file that FLASH_DMATTN_LIBRARY names (a build that is not installed).

    A library with a namespace of its own (FLASH_DMATTN_NAMESPACE in CMake) has its name, as in NAMESPACE.abi3.so.

    Returns:
        The namespace of its operators.
    """
    named = os.environ.get("FLASH_DMATTN_LIBRARY")
    folders = sys.modules[_PACKAGE].__path__
    candidates = [Path(named)] if named else [Path(folder) / "_C.so" for folder in folders]
    if not named:
        candidates += (path for folder in folders for path in Path(folder).glob("*.abi3.so"))
    for path in candidates:
        if path.is_file():
            torch.ops.load_library(str(path))
            name = path.name.partition(".")[0]
            return "flash_dmattn" if name == "_C" else name
    message = (
        f"flash_dmattn: the compiled operators are missing ({', '.join(map(str, candidates))}). "
        "Install the package with `pip install .`, or set FLASH_DMATTN_LIBRARY to a built _C.so."
    )
    if _is_command_line():
        print(message, file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(message)


def _is_command_line() -> bool:
    """Whether this is `python -m flash_dmattn`, which imports the package before its __main__ can catch an error."""
    options = sys.orig_argv[1:]
    return sys.argv[:1] == ["-m"] and "-m" in options and _PACKAGE in options


# Of the operators in torch.ops. Libraries of two versions have different ones, and live in one process.
NAMESPACE = _load_library()
operators = getattr(torch.ops, NAMESPACE)
forward = operators.forward.default
backward = operators.backward.default
select_and_attend = operators.select_and_attend.default
select_key_intervals = operators.select_key_intervals.default
select_key_list = operators.select_key_list.default
rank_keys = operators.rank_keys.default
measure_key_bound = operators.measure_key_bound.default
build_tile_lists = operators.build_tile_lists.default
zero_sum = operators.zero_sum.default
backends = operators.backends.default
kernel_names = operators.kernel_names.default
record_kernels = operators.record_kernels.default
kv_fill = operators.kv_fill.default
kv_append = operators.kv_append.default
kv_pending_intervals = operators.kv_pending_intervals.default
kv_commit = operators.kv_commit.default
kv_copy_rows = operators.kv_copy_rows.default
kv_decode_step = operators.kv_decode_step.default


@cache
def _cuda_is_available() -> bool:
    lines = (line.split("\t") for line in backends().splitlines())
    return any(name == "cuda" and available == "1" for name, available, _ in lines)


def _has_cuda() -> bool:
    return _cuda_is_available()


# torch.compile would trace into a cached function, and cannot trace an operator that returns text. This is
# torch.compiler.assume_constant_result without its import of the compiler: two seconds, and an error of its
# own where Triton is broken.
_has_cuda._dynamo_marked_constant = True


def has_kernels_for(tensor: Tensor) -> bool:
    """Whether selection and tile lists are the library's on the device of `tensor`; else they are in portable.py."""
    return tensor.is_cpu or tensor.is_meta or (tensor.is_cuda and _has_cuda())


FORWARD, BACKWARD, SELECT_AND_ATTEND = map(Signature, (forward, backward, select_and_attend))
# All but which gradients are needed: what forward takes and gives, in its order.
_BACKWARD_INPUTS = ("dout", *FORWARD.tensors, *FORWARD.results, *FORWARD.options)
assert BACKWARD.arguments == (*_BACKWARD_INPUTS, *(f"need_{name}" for name in GRADIENTS.values()))


# ---- Shapes, dtypes and strides of the results -------------------------------------------------------


def _require_device_of(first, **others):
    """torch takes these functions when any argument is a meta tensor, even if the result is not one."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise TypeError(f"{name}: got a tensor on {tensor.device}, expected {first.device}")


@torch.library.register_fake(f"{NAMESPACE}::forward")
def _forward_fake(*arguments):
    named = FORWARD.named(arguments)
    q = named["q"]
    _require_device_of(q, **{name: named[name] for name in FORWARD.tensors})
    return _attention_results(q)


def _attention_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse."""
    batch, seqlen_q, heads_q, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty((2, batch, heads_q, seqlen_q), dtype=lse_dtype)


@torch.library.register_fake(f"{NAMESPACE}::select_and_attend")
def _select_and_attend_fake(q, k, v, bias, *options):
    _require_device_of(q, k=k, v=v, bias=bias)
    return *_attention_results(q), bias.new_empty((*bias.shape, 2), dtype=torch.int32)


@torch.library.register_fake(f"{NAMESPACE}::backward")
def _backward_fake(*arguments):
    named = BACKWARD.named(arguments)

    def gradient(name: str, result: str) -> Tensor:
        tensor = named["q"] if named[name] is None else named[name]
        return tensor.new_empty(tensor.shape if named[f"need_{result}"] else (0,))

    return tuple(gradient(name, result) for name, result in GRADIENTS.items())


@torch.library.register_fake(f"{NAMESPACE}::select_key_intervals")
def _select_fake(scores, key_mask, *options):
    _require_device_of(scores, key_mask=key_mask)
    return scores.new_empty((*scores.shape, 2), dtype=torch.int32)


@torch.library.register_fake(f"{NAMESPACE}::select_key_list")
def _select_list_fake(scores, key_mask, window):
    _require_device_of(scores, key_mask=key_mask)
    batch, heads, key_length = scores.shape
    stride = -(-min(window, key_length) // 128) * 128  # of tile lists
    keys = scores.new_empty((batch, heads, stride), dtype=torch.int32)
    return keys, scores.new_empty((batch, heads), dtype=torch.int32)


@torch.library.register_fake(f"{NAMESPACE}::rank_keys")
def _rank_fake(scores, mask, bias, *options):
    _require_device_of(scores, mask=mask, bias=bias)
    dense = [t for t in (mask, bias) if t is not None]
    sizes = zip(scores.shape[:2], *(t.shape[:2] for t in dense), strict=True)
    batch, heads = (0 if 0 in size else max(size) for size in sizes)
    seqlen_q = max(t.shape[2] for t in dense)
    rank = scores.new_empty((*scores.shape[:2], 1, scores.shape[2]), dtype=torch.int32)
    return rank, scores.new_empty((batch, heads, seqlen_q, 1), dtype=torch.int32)


# The six tensors of a KV cache come first: k_cache, v_cache, score_cache, positions, counts, seen.


@torch.library.register_fake(f"{NAMESPACE}::kv_fill")
def _kv_fill_fake(k_cache, *others):
    return None


@torch.library.register_fake(f"{NAMESPACE}::kv_append")
def _kv_append_fake(k_cache, *others):
    return None


@torch.library.register_fake(f"{NAMESPACE}::kv_commit")
def _kv_commit_fake(k_cache, *others):
    return None


@torch.library.register_fake(f"{NAMESPACE}::kv_copy_rows")
def _kv_copy_rows_fake(k_cache, *others):
    return None


@torch.library.register_fake(f"{NAMESPACE}::kv_pending_intervals")
def _kv_pending_intervals_fake(
    k_cache, v_cache, score_cache, positions, counts, seen, window, pending, *options
):
    batch, heads = k_cache.shape[:2]
    return k_cache.new_empty((batch, heads, window + pending, 2), dtype=torch.int32)


@torch.library.register_fake(f"{NAMESPACE}::kv_decode_step")
def _kv_decode_step_fake(
    k_cache, v_cache, score_cache, positions, counts, seen, window, q, *options
):
    _require_device_of(q, k_cache=k_cache)
    batch, _, heads_q, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads_q, 1), dtype=torch.float32)


# ---- Derivatives -------------------------------------------------------------------------------------

# What errors say of transforms: here behind the package's name, where arguments are checked behind theirs.
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

# torch.library.register_autograd would do the same in 90 µs a call more: it fills in defaults by the schema and
# passes through the dispatcher twice.


class _Attention(torch.autograd.Function):
    """forward with its first derivative."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            results = forward(*inputs)
        return _saved(ctx, FORWARD, inputs, results)

    @staticmethod
    def backward(ctx, dout, *_):
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        arguments = (dout, *ctx.saved_tensors, *ctx.options)
        return _input_gradients(ctx, FORWARD, arguments)


class _SelectAndAttend(torch.autograd.Function):
    """select_and_attend with its first derivative, that of forward: the choice has none."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            results = select_and_attend(*inputs)
        return _saved(ctx, SELECT_AND_ATTEND, inputs, results)

    @staticmethod
    def backward(ctx, dout, *_):
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        signature = SELECT_AND_ATTEND
        names = (*signature.tensors, *signature.results, *signature.options)
        named = dict(zip(names, (*ctx.saved_tensors, *ctx.options), strict=True))
        bound = (named["window"], int(named["is_causal"]))
        named |= {
            "dout": dout,
            "key_bound": bound,
            "is_causal": False,
        }  # intervals include causality
        return _input_gradients(ctx, signature, tuple(map(named.get, _BACKWARD_INPUTS)))


def _saved(
    ctx, signature: Signature, inputs: tuple, results: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The results, of which out alone has a derivative, saved with the inputs for backward.

    The tensors come first among the arguments of an operator.
    """
    tensors = len(inputs) - len(signature.options)
    ctx.save_for_backward(*inputs[:tensors], *results)
    ctx.options = inputs[tensors:]
    ctx.mark_non_differentiable(*results[1:])
    ctx.set_materialize_grads(False)
    return results


def _input_gradients(ctx, signature: Signature, arguments: tuple) -> tuple[Tensor | None, ...]:
    """The gradient of each input of an operator: results of backward, None for those that are not wanted."""
    wanted = tuple(ctx.needs_input_grad[i] for i in signature.differentiable)
    if torch.is_grad_enabled():  # create_graph
        gradients = backward(*arguments, *wanted)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            gradients = backward(*arguments, *wanted)
    of_inputs: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for i, gradient, is_wanted in zip(signature.differentiable, gradients, wanted, strict=True):
        of_inputs[i] = gradient if is_wanted else None
    return tuple(of_inputs)


class _Gradients(torch.autograd.Function):
    """backward, which has no derivative."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return backward(*inputs)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def _differentiable(operator, function: type[torch.autograd.Function]):
    def call(*inputs):
        _refuse_tangents(inputs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(f"flash_dmattn: {NO_FUNCTIONAL_GRADIENT}")
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    return call


def _refuse_tangents(inputs: tuple) -> None:
    """torch would silently make forward-mode derivatives 0. The public functions name the argument; this is for compiled
    calls and for those of the operators themselves."""
    if forward_ad._current_level < 0:
        return
    for value in inputs:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(f"flash_dmattn: {NO_TANGENT}")


def _without_dispatcher(operator, differentiable):
    """`operator`, whose implementation for autograd is `differentiable`. Where nothing traces or transforms the call, it
    does not pass through the dispatcher on its way there: 10 µs of 25."""

    def call(*inputs):
        transformed = torch._C._functorch.peek_interpreter_stack
        if torch.compiler.is_compiling() or transformed() is not None:
            return operator(*inputs)
        if _missing_rules:
            register_rules()
        return differentiable(*inputs)

    return call


# ---- Rules that modules of torch keep ------------------------------------------------------------------

# The module of torch, and ours that registers on import. torch's are slow to import, and most processes need neither.
_missing_rules = {
    "torch.utils.flop_counter": ".flops",
    "torch.distributed.tensor": ".distributed.sharding",
}


def register_rules() -> None:
    """Registers the rules of torch's modules that have been imported.

    Called when this package is imported and before a call of attention, until none is missing: torch has no place for a
    rule before it has the module.
    """
    for name in [name for name in _missing_rules if name in sys.modules]:
        rules = _missing_rules.pop(name)
        try:
            importlib.import_module(rules, _PACKAGE)
        except Exception as error:  # no reason for attention not to run
            warnings.warn(
                f"{name} is without the rules of {_PACKAGE}{rules}: {type(error).__name__}: {error}",
                stacklevel=2,
            )


_forward = _differentiable(forward, _Attention)
_select_and_attend = _differentiable(select_and_attend, _SelectAndAttend)
_autograd = torch.library.Library(NAMESPACE, "FRAGMENT")
_autograd.impl("forward", _forward, "Autograd")
_autograd.impl("select_and_attend", _select_and_attend, "Autograd")
_autograd.impl("backward", _differentiable(backward, _Gradients), "Autograd")

attend = _without_dispatcher(forward, _forward)
attend_to_best = _without_dispatcher(select_and_attend, _select_and_attend)
