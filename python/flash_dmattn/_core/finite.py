"""Check mode, FLASH_DMATTN_CHECK_FINITE=1: a call raises an error that names the first element that is inf or NaN."""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from .checks import add_query_dimension, may_read

# -inf is a mask in a bias, a query that sees no key in lse, and no sink in sink_logits.
_MINUS_INF_IS_FINE = ("bias", "lse", "sink_logits")


def read_setting() -> bool:
    """Returns whether the environment switches check mode on.

    Raises ValueError for any value but 0 and 1: a user who sets "true" relies on the check.
    """
    value = os.environ.get("FLASH_DMATTN_CHECK_FINITE", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"FLASH_DMATTN_CHECK_FINITE: got {value}, expected 0 or 1")
    return value == "1"


_setting = cache(read_setting)  # reading os.environ takes 3 µs; a short call takes 25 µs


def is_enabled() -> bool:
    """Whether calls are checked. Compiled code is not: torch.compile cannot trace a branch on a tensor's value."""
    if is_compiling():
        _warn_that_compiled_code_is_unchecked()
        return False
    return _setting()


def _warn_that_compiled_code_is_unchecked() -> None:
    if _setting():
        warnings.warn(
            "FLASH_DMATTN_CHECK_FINITE: code compiled by torch.compile is not checked, run it uncompiled",
            stacklevel=2,
        )


# With this mark, torch.compile calls the function while it traces. Otherwise it would skip the warning.
_warn_that_compiled_code_is_unchecked._dynamo_marked_constant = True


def check_inputs(held: Tensor | None = None, **tensors: Tensor | None) -> list[Tensor | None]:
    """Checks the tensors and returns them. A tensor that needs a gradient is returned as a view with a hook, which
    checks the gradient of this call alone.

    tensors: q, k, v, bias and sink_logits.
    held: bool [B, Hkv or 1, Sk], the places of a cache that hold a key; None: all places.
    """
    read = {}
    if held is not None:
        by_token = held.transpose(1, 2)[..., None]
        read = {"k": by_token, "v": by_token, "bias": held[:, :, None]}
    return [
        t if t is None else _check_input(t, name, read.get(name)) for name, t in tensors.items()
    ]


def _check_input(tensor: Tensor, name: str, read: Tensor | None) -> Tensor:
    _raise_for_first("forward input", name, tensor, read)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    view = tensor.view_as(tensor)
    _check_gradient_of(view, "backward output", name)
    return view


def check_new_tokens(
    query: Tensor, key: Tensor | None, value: Tensor | None, rows: Tensor | None = None
) -> bool:
    """Checks the tokens of a step in check mode, and returns whether it is on. A cache calls this function before it changes.

    rows: int32, the pool's row for each entry of the first dimension. Tokens with a negative row are not read.
    """
    if not is_enabled():
        return False
    for name, tensor in (("q", query), ("k", key), ("v", value)):
        if tensor is not None:
            read = None if rows is None else (rows >= 0).view(-1, *[1] * (tensor.dim() - 1))
            _raise_for_first("forward input", name, tensor, read)
    return True


def check_outputs(out: Tensor, statistics: Tensor | None) -> None:
    """Checks out and lse, and their gradients in backward. statistics: [.., B, Hq, Sq]; statistics[0] is lse."""
    _raise_for_first("forward output", "out", out)
    _check_gradient_of(out, "backward input", "out")
    if statistics is not None:
        _raise_for_first("forward output", "lse", statistics[0])
        _check_gradient_of(statistics, "backward input", "lse")


def _check_gradient_of(tensor: Tensor, stage: str, name: str) -> None:
    def hook(gradient: Tensor | None) -> None:
        if gradient is not None:
            checked = gradient[0] if name == "lse" else gradient
            _raise_for_first(stage, f"d{name}", checked)

    if tensor.requires_grad:
        tensor.register_hook(hook)


def _raise_for_first(stage: str, name: str, tensor: Tensor, read: Tensor | None = None) -> None:
    """Raises for the first element that is not finite. read: bool, which elements are read (broadcast); None: all."""
    if is_compiling():  # a hook of compiled autograd
        return
    tensor = _own_values(tensor)
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return
    if not may_read():
        raise RuntimeError(
            "FLASH_DMATTN_CHECK_FINITE: got a CUDA graph under capture, expected none: the check waits for the device"
        )
    if name.endswith("bias"):
        tensor = add_query_dimension(tensor)
    wrong = ~tensor.isfinite()
    if name in _MINUS_INF_IS_FINE:
        wrong &= tensor != -torch.inf
    if read is not None:
        wrong &= read
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        raise RuntimeError(f"{stage} {name}{first} is {tensor[tuple(first)].item()}")


def _own_values(tensor: Tensor) -> Tensor:
    """Returns the values in this process: the local part of a DTensor, and all rows under torch.func.vmap."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
