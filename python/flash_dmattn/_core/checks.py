"""Checks and normal forms of the arguments that the functions share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from numbers import Integral, Real

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .autograd import NO_FUNCTIONAL_GRADIENT, NO_TANGENT, NO_TRANSFORM, is_transformed
from .availability import check_backend_name, check_backend_runs, unavailable_reason
from .gradients import widen

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GPU_DTYPES = (torch.bfloat16, torch.float16)

# The mask value for each dtype of a bias. A bias at or below it masks its element (mask_value in
# include/flash_dmattn/types.h).
MASK_VALUE = {
    torch.float64: -1e30,
    torch.float32: -1e30,
    torch.bfloat16: -1e30,
    torch.float16: -1e4,
}


# Types accepted as numbers: Python's, numpy's, torch.compile's, and tensors of one element. Python's are first
# because an isinstance test of an abstract class takes a microsecond.
NUMBERS = (float, int, Real, torch.SymFloat, torch.SymInt, Tensor)
LARGEST_COUNT = 2**31 - 1
LARGEST_HEAD_DIM = 256
_INTEGERS = (int, Integral, torch.SymInt)
_BOOLS = (bool, torch.SymBool)
# The limit of scale and softcap, which kernels round to float32.
FLOAT32_MAX = torch.finfo(torch.float32).max


def attention_inputs(
    query: Tensor, key: Tensor, value: Tensor, layout: str, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, str]:
    """Checks query, key and value, casts them as torch.autocast prescribes, and pads query and key with zeros. Returns them
    and the backend, as `check_device` does.

    It pads if the head dimension of value is larger; zeros add nothing to query . key. A bias keeps its dtype: a
    float32 bias with 16-bit inputs is supported.
    layout: "B, S, H, D", or "total, H, D" for packed sequences.
    """
    backend = resolve_backend(backend)
    is_autocast = torch._C._is_any_autocast_enabled()
    if is_autocast or not are_alike(query, key, value):
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_tensor(tensor, name)
        if is_autocast:
            query, key, value = autocast_tensors(query, key, value)
        _check_types(query, key, value)
    dims = layout.count(",") + 1
    if not query.dim() == key.dim() == value.dim() == dims:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != dims:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected [{layout}]")
    backend = check_device(query, backend)
    missing = _check_shapes(query, key, value)
    if missing > 0:
        query, key = (F.pad(t, (0, missing)) for t in (query, key))
    return query, key, value, backend


def attention_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scores: Tensor | None,
    saturate: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, str]:
    """Checks the tensors of a call, and the name of a backend, and returns them in normal form.

    bias, mask, scores: as `bias_argument`, `mask_argument` and `selection_scores_argument` return them.
    """
    query, key, value, backend = attention_inputs(query, key, value, "B, S, H, D", backend)
    if not is_compiling() and is_transformed():
        refuse_transforms(
            query=query, key=key, value=value, attn_bias=bias, selection_scores=scores
        )
    if bias is not None:
        bias = bias_argument(bias, query, key, saturate)
    if scores is not None:
        scores = selection_scores_argument(scores, query, key)
    if mask is not None:
        mask = mask_argument(mask, query, key)
    return query, key, value, bias, mask, scores, backend


def are_alike(query: object, key: object, value: object) -> bool:
    """Returns True if the three are known to be dense tensors of one supported dtype and one device.

    This quick test saves 2 µs of 30. It may return False for tensors that a slower test would accept.
    """
    return (
        type(query) is type(key) is type(value) is Tensor
        and query.dtype is key.dtype is value.dtype
        and query.dtype in DTYPES
        and query.device == key.device == value.device
        and query.layout is key.layout is value.layout is torch.strided
        and not (query.is_nested or key.is_nested or value.is_nested)
    )


def autocast_tensors(*tensors: Tensor) -> Sequence[Tensor]:
    """Casts tensors of one device to the dtype that torch.autocast prescribes, if autocast is enabled."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return [
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    ]


def check_tensor(value: object, name: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else value.layout
        raise TypeError(
            f"{name}: got a {layout} tensor, expected a dense one; sequences of different lengths go packed into "
            "flash_dmattn_varlen_func"
        )


def check_shape(value: object, name: str, shape: Sequence[int]) -> None:
    check_tensor(value, name)
    if value.shape != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected {tuple(shape)}")


def check_tensors(**tensors: object) -> None:
    for name, tensor in tensors.items():
        check_tensor(tensor, name)


def projection_arguments(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None, has_factor: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Checks the tensors of a score projection: hidden [B, S, F], weight [H, F], bias [H] or None, and factor [H] if has_factor.

    Returns the last three in the dtype of hidden, or in float32 or wider, which kernels read.
    """
    check_tensor(hidden, "hidden")
    if hidden.dim() != 3 or not hidden.is_floating_point():
        raise ValueError(
            f"hidden: got {hidden.dtype} of shape {tuple(hidden.shape)}, expected floating numbers [B, S, F]"
        )
    wide = torch.promote_types(hidden.dtype, torch.float32)

    def converted(tensor: Tensor, name: str, shape: tuple[int | None, ...]) -> Tensor:
        check_tensor(tensor, name)
        sizes = zip(shape, tensor.shape, strict=False)
        if tensor.dim() != len(shape) or any(
            size is not None and size != own for size, own in sizes
        ):
            expected = ", ".join("H" if size is None else str(size) for size in shape)
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected [{expected}]")
        check_floating(tensor.dtype, name)
        check_on_device(tensor, name, hidden.device)
        return tensor if tensor.dtype in (hidden.dtype, wide) else tensor.to(wide)

    weight = converted(weight, "weight", (None, hidden.shape[2]))
    heads = (weight.shape[0],)
    bias = None if bias is None else converted(bias, "bias", heads)
    return weight, bias, converted(factor, "A", heads) if has_factor else None


def check_on_device(tensor: Tensor, name: str, device: torch.device) -> None:
    if tensor.device != device:
        raise TypeError(f"{name}: got a tensor on {tensor.device}, expected {device}")


def check_positions(positions: Tensor, name: str) -> None:
    """Raises unless `positions` is an int32 or int64 tensor of token positions."""
    check_tensor(positions, name)
    if positions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: got {positions.dtype}, expected int64 or int32")


def check_integer(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        raise TypeError(f"{name}: got {value!r}, expected an integer")


def check_count(value: object, name: str) -> None:
    """Raises unless `value` is an integer, 0 or more."""
    check_integer(value, name)
    if value < 0:
        raise ValueError(f"{name}: got {value}, expected 0 or more")


def check_floating(dtype: object, name: str) -> None:
    """Raises unless `dtype` is a floating dtype, or None for torch's default."""
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return
    raise TypeError(f"{name}: got {dtype!r}, expected a floating torch.dtype")


def check_head_dim(head_dim: int, got: str) -> None:
    """Raises for an unsupported head dimension. got: the begin of the error, such as "query: got head dimension"."""
    if not 1 <= head_dim <= LARGEST_HEAD_DIM:
        raise ValueError(f"{got} {head_dim}, expected 1 to {LARGEST_HEAD_DIM}")


def resolve_flag(value: object, name: str) -> bool:
    """Returns a flag as a bool, False for None. Raises TypeError for a string: bool("False") would be True."""
    if value is None or isinstance(value, _BOOLS):
        return bool(value)
    if not isinstance(value, (str, Tensor)) and value in (0, 1):  # such as numpy's bool
        return bool(value)
    raise TypeError(f"{name}: got {value!r}, expected True or False")


def check_flag(value: object, name: str) -> bool:
    """Calls resolve_flag for a flag that is True by default, and raises for None, which could mean True or False."""
    if value is None:
        raise TypeError(f"{name}: got None, expected True or False")
    return resolve_flag(value, name)


def may_read() -> bool:
    """Whether the values of tensors may be read. They may not in compiled code and while a CUDA graph is captured."""
    if is_compiling():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def refuse_transforms(**tensors: object) -> None:
    """Raises for tensors under forward-mode differentiation or torch.func's reverse mode.

    Attention has no forward-mode derivatives, and torch would silently make them 0. torch.func's reverse mode does not
    look into custom operators.
    """
    if is_compiling() or not is_transformed():
        return
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(f"{name}: {NO_TANGENT}")
        if torch._C._functorch.is_gradtrackingtensor(tensor):
            raise RuntimeError(f"{name}: {NO_FUNCTIONAL_GRADIENT}")


def refuse_all_transforms(**tensors: object) -> None:
    """Raises under every transform of torch.func, even if none of the tensors takes part in it."""
    refuse_transforms(**tensors)
    if is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    is_mapped = torch._C._functorch.is_batchedtensor
    names = (name for name, t in tensors.items() if isinstance(t, Tensor) and is_mapped(t))
    raise RuntimeError(f"{next(names, 'flash_dmattn')}: {NO_TRANSFORM}")


def _check_types(query: Tensor, key: Tensor, value: Tensor) -> None:
    dtype, device = query.dtype, query.device
    if dtype not in DTYPES:
        raise TypeError(f"query: got {dtype}, expected float32, bfloat16, float16 or float64")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != dtype or tensor.device != device:
            raise TypeError(
                f"{name}: got {tensor.dtype} on {tensor.device}, expected that of query, {dtype} on {device}"
            )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Returns head_dim of value minus head_dim of query. Raises ValueError for shapes that do not match."""
    query_shape, key_shape, value_shape = query.shape, key.shape, value.shape
    if value_shape != key_shape and (
        not 1 <= value_shape[-1] <= LARGEST_HEAD_DIM or value_shape[:-1] != key_shape[:-1]
    ):
        raise ValueError(
            f"value: got shape {tuple(value.shape)}, expected that of key, {tuple(key.shape)}, or another head dimension "
            f"from 1 to {LARGEST_HEAD_DIM}"
        )
    heads_q, head_dim = query_shape[-2], query_shape[-1]
    heads_kv = key_shape[-2]
    has_batch = len(query_shape) == 4
    if key_shape[-1] != head_dim or (has_batch and key_shape[0] != query_shape[0]):
        raise ValueError(
            f"key: got shape {tuple(key.shape)}, expected batch and head dimension of query, "
            f"{tuple(query.shape)}"
        )
    if heads_q % heads_kv != 0 if heads_kv > 0 else heads_q > 0:
        raise ValueError(
            f"key: got {heads_kv} heads, expected a divisor of the {heads_q} heads of query"
        )
    check_head_dim(head_dim, "query: got head dimension")
    return value_shape[-1] - head_dim


def _runs_on_cpu(backend: str) -> bool:
    if backend == "flex":
        return True
    return (
        importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
    )


def check_device(query: Tensor, backend: str) -> str:
    """Returns `backend` if it names one. Otherwise returns "triton" for float32 on a CUDA GPU, for which the library
    has no kernels, and "" (the library's choice) in all other cases. Raises if no such backend can run there."""
    if backend in ("triton", "flex"):
        # On the CPU: Triton interpreted, and the forward of FlexAttention, which raise their own errors.
        if not (is_compiling() or (query.is_cpu and _runs_on_cpu(backend))):
            check_backend_runs(backend)
        return backend
    if not (query.is_cpu or query.is_cuda or query.is_meta):
        raise RuntimeError(f"query: got a tensor on {query.device}, expected cpu or cuda")
    if query.is_cuda:
        if not backend and query.dtype == torch.float32:
            backend = "triton"
        needed = backend or "cuda"
        reason = "" if is_compiling() else unavailable_reason(needed)
        if needed == "triton" and not reason:
            return backend
        if reason and needed == "cuda":
            raise RuntimeError(f"query: got a tensor on {query.device}, expected cpu: {reason}")
        if query.dtype not in GPU_DTYPES:
            only = f"; float32 takes Triton's kernels, but {reason}" if reason else ""
            raise TypeError(
                f"query: got {query.dtype} on {query.device}, expected bfloat16 or float16 (convert with .to(), or "
                f'compute under torch.autocast("cuda", torch.bfloat16)){only}'
            )
    return backend


def resolve_backend(backend: object) -> str:
    """Returns the name of a backend, or "" for None: the first backend that supports the problem."""
    if backend is None:
        return ""
    if not isinstance(backend, str):
        raise TypeError(
            f"backend: got {backend!r}, expected a name, or None for the first that supports the problem"
        )
    if backend:
        check_backend_name(backend)
    return backend


def broadcast_argument(tensor: Tensor, name: str, query: Tensor, key: Tensor) -> Tensor:
    """Checks a mask or bias, and returns it with three or four dimensions. Nothing is expanded.

    A mask or bias for all queries is [B or 1, Hq or Hkv or 1, Sk or 1]. With a query dimension it is
    [B or 1, Hq or Hkv or 1, Sq or 1, Sk or 1]. A tensor of two dimensions is [B, Sk], and gets a head dimension.
    """
    check_tensor(tensor, name)
    shape = tensor.shape
    if len(shape) == 2:
        tensor = tensor.unsqueeze(1)
    batch, seqlen_q, heads_q, _ = query.shape
    _, seqlen_k, heads_kv, _ = key.shape
    sizes = tensor.shape
    fits = (
        (len(sizes) == 3 or (len(sizes) == 4 and (sizes[2] == seqlen_q or sizes[2] == 1)))
        and (sizes[0] == batch or sizes[0] == 1)
        and (sizes[1] == heads_q or sizes[1] == heads_kv or sizes[1] == 1)
        and (sizes[-1] == seqlen_k or sizes[-1] == 1)
    )
    if not fits:
        raise ValueError(
            f"{name}: got shape {tuple(shape)}, expected [B, Sk], [B, H, Sk] or [B, H, Sq, Sk] with B = {batch}, "
            f"H = {heads_q} or {heads_kv}, Sq = {seqlen_q}, Sk = {seqlen_k}, any of them 1"
        )
    check_on_device(tensor, name, query.device)
    return tensor


def add_query_dimension(tensor: Tensor) -> Tensor:
    """Returns a mask or bias with four dimensions."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def squeeze_query_dimension(tensor: Tensor) -> Tensor:
    """Returns scores or a bias as [B, H, Sk] if they are the same for every query."""
    return tensor.squeeze(2) if tensor.dim() == 4 and tensor.shape[2] == 1 else tensor


def mask_argument(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Checks attn_mask, and returns it as [B or 1, Hq or Hkv or 1, Sq or 1, Sk or 1]."""
    mask = add_query_dimension(broadcast_argument(mask, "attn_mask", query, key))
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attn_mask: got {mask.dtype}, expected torch.bool (True: visible); "
            "additive masks go into attn_bias"
        )
    return mask


def bias_argument(bias: Tensor, query: Tensor, key: Tensor, saturate: bool) -> Tensor:
    """Checks attn_bias, and returns it as [B or 1, Hq or Hkv or 1, Sk or 1], or with a query dimension as
    [B or 1, Hq or Hkv or 1, Sq or 1, Sk or 1]."""
    bias = check_bias(bias, "attn_bias", query, key)
    return bias if bias.dtype == query.dtype else widen_bias(bias, query.dtype, saturate)


def widen_bias(bias: Tensor, dtype: torch.dtype, saturate: bool = True) -> Tensor:
    """Returns the bias in float32, or in float64 if `dtype` is float64. Elements that mask in the old dtype become
    -inf."""
    if bias.dtype == torch.float16:  # its mask values do not mask in a wider dtype
        bias = bias.masked_fill(bias <= MASK_VALUE[torch.float16], float("-inf"))
    # A bias that has the dtype already skips torch's call, which takes 4 µs of 30.
    wide = _wide_dtype(dtype)
    return bias if bias.dtype is wide else widen(bias, wide, saturate)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def check_bias(bias: Tensor, name: str, query: Tensor, key: Tensor) -> Tensor:
    """Checks a bias like `bias_argument`, but keeps its dtype."""
    bias = broadcast_argument(bias, name, query, key)
    if not bias.is_floating_point():
        masks = "; boolean masks go into attn_mask" if bias.dtype == torch.bool else ""
        raise TypeError(f"{name}: got {bias.dtype}, expected a floating dtype{masks}")
    return bias


def selection_scores_argument(scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    check_tensor(scores, "selection_scores")
    scores = check_bias(scores.detach(), "selection_scores", query, key)
    return scores if scores.dtype == query.dtype else scores.to(_wide_dtype(query.dtype))


def clamp_count(count: int) -> int:
    """Limits a count of positions to the largest int32, so that sums stay within int64. No row is beyond it. Other integers
    than torch's symbols, such as NumPy's, become int."""
    return count if isinstance(count, torch.SymInt) else min(int(count), LARGEST_COUNT)


def check_scores_have_rule(scores: Tensor | None, rule: object | None) -> None:
    if scores is not None and rule is None:
        raise ValueError(
            f"selection_scores: got shape {tuple(scores.shape)} without keep_window_size, by which they select; "
            "expected both or neither"
        )


def check_bias_delay(bias_delay: int, bias: Tensor | None) -> None:
    check_count(bias_delay, "bias_delay")
    if bias_delay and bias is None:
        raise ValueError(f"bias_delay: got {bias_delay} without attn_bias, expected a bias")


def bias_of_keys(bias: Tensor, bias_delay: int) -> Tensor:
    bias = squeeze_query_dimension(bias)
    if bias.dim() != 3:
        raise ValueError(
            f"bias_delay: got {bias_delay} with a bias of shape {tuple(bias.shape)}, expected one value for each key"
        )
    return bias
