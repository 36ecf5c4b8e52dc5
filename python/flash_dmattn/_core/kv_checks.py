"""Checks of the arguments of KV caches. A cache changes in place, so all checks come before the first write."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .checks import check_count, check_on_device, check_shape, check_tensor, refuse_transforms

# The limit on a GPU, most_unequal_heads in src/common/kv_cache/head_slots.h.
_MOST_HEAD_WINDOWS = 128
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def check_like(
    tensor: object,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    of: str = "",
) -> None:
    check_shape(tensor, name, shape)
    check_dtype_and_device(tensor, name, dtype, device, of)


def check_dtype_and_device(
    tensor: Tensor, name: str, dtype: torch.dtype, device: torch.device, of: str = ""
) -> None:
    """Raises for another dtype or device. of: the argument that `dtype` and `device` come from, for the error."""
    if tensor.dtype != dtype or tensor.device != device:
        expected = f"{dtype} on {device}, those of {of}" if of else f"{dtype} on {device}"
        raise TypeError(f"{name}: got {tensor.dtype} on {tensor.device}, expected {expected}")


def check_not_expanded(tensor: Tensor, name: str) -> None:
    """Raises ValueError for an expanded tensor (stride 0), which cannot be written in place."""
    if any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ValueError(f"{name}: got an expanded tensor, expected memory for every element")


def check_chunk(cache: Tensor, value_dim: int, key_mask: Tensor | None, **tensors: Tensor) -> int:
    """Checks new tokens that have one query each, and returns their number.

    cache: the cache's keys as [B, any number, Hkv, D]. value_dim: Dv.
    tensors: query, key, value and scores by the caller's names, in this order.
    """
    (name, query), *tokens = tensors.items()
    count = check_tokens(cache, value_dim, **dict(tokens))
    queries = check_query(cache, **{name: query})
    if queries != count:
        raise ValueError(f"{name}: got {queries} queries, expected one for each of {count} tokens")
    if key_mask is not None:
        check_mask(key_mask, (cache.shape[0], count), cache.device)
    return count


def check_tokens(cache: Tensor, value_dim: int, **tensors: Tensor | None) -> int:
    """Checks new tokens, and returns their number n.

    cache, value_dim: as in `check_chunk`.
    tensors: key [B, n, Hkv, D], value [B, n, Hkv, Dv], and scores float32 [B, Hkv, n] or None, in this order.
    """
    (_, key), _, (name, scores) = tensors.items()
    batch, _, heads, head_dim = cache.shape
    count = key.shape[1] if isinstance(key, Tensor) and key.dim() == 4 else 0
    states = zip(tensors.items(), (head_dim, value_dim), strict=False)
    for (name_of_state, state), columns in states:
        shape = (batch, count, heads, columns)
        check_like(state, name_of_state, shape, cache.dtype, cache.device, "the cache")
    if scores is not None:
        check_like(scores, name, (batch, heads, count), torch.float32, cache.device)
    return count


def check_query(cache: Tensor, *, of: str = "the cache", **tensor: Tensor) -> int:
    """Checks queries [B, n, Hq, D], and returns their number n. of: as in `check_dtype_and_device`."""
    ((name, query),) = tensor.items()
    check_tensor(query, name)
    batch, _, heads, head_dim = cache.shape
    fits = query.dim() == 4 and (query.shape[0], query.shape[3]) == (batch, head_dim)
    if not fits or (query.shape[2] % heads if heads else query.shape[2]):
        raise ValueError(
            f"{name}: got shape {tuple(query.shape)}, expected [{batch}, n, Hq, {head_dim}] with Hq a multiple of "
            f"{heads}"
        )
    check_dtype_and_device(query, name, cache.dtype, cache.device, of)
    return query.shape[1]


def check_mask(mask: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    check_like(mask, "key_mask", shape, torch.bool, device)


def check_slots(places: int, pending: int, slots: int, shares: int = 1) -> None:
    """Raises if `places` or `pending` do not fit into `slots`.

    places: how many slots the cache's rule needs. shares: how many heads divide the other slots equally.
    """
    if places > slots:
        raise ValueError(
            f"keep_window_size: got a rule with {places} keys, expected at most {slots}, the slots of k"
        )
    chunk, rest = divmod(slots - places, shares)
    if rest:
        raise ValueError(
            f"k: got {slots} slots, expected {places} and a multiple of {shares}, as many for pending tokens in each head"
        )
    check_count(pending, "pending")
    if pending > chunk:
        raise ValueError(f"pending: got {pending}, expected at most {chunk}, the chunk")


def check_counts(counts: Tensor, name: str, places: list[int]) -> None:
    """Raises unless each head has 0 to its number of `places` taken slots.

    Counts on a GPU are not read, because that would wait for it. Its kernels clamp them.
    """
    if not counts.is_cpu or torch.compiler.is_compiling():
        return
    taken = counts[..., 0]
    if ((taken < 0) | (taken > torch.tensor(places))).any():
        most = ", ".join(map(str, sorted(set(places))))
        raise ValueError(
            f"{name}: got {taken.min()} to {taken.max()} taken slots of a head, expected 0 to {most}"
        )


def check_value_dim(value_dim: int, head_dim: int) -> None:
    if not 1 <= value_dim <= head_dim:
        raise ValueError(f"value_dim: got {value_dim}, expected 1 to {head_dim}, the head_dim")


def check_slot_kernels(
    name: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    device: torch.device,
    *,
    instead: str,
) -> None:
    """Raises unless the CUDA backend supports slots of this dtype and these sizes; other devices pass.

    name: argument whose dtype is checked, for the error. instead: alternative for float32, for the error.
    """
    if device.type != "cuda":
        return
    if dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"{name}: got {dtype} on {device}, expected bfloat16 or float16: there are no kernels for slots of another "
            f"dtype on a GPU. {instead}"
        )
    for part, size in (("head_dim", head_dim), ("value_dim", value_dim)):
        if size % 8:
            raise ValueError(
                f"{part}: got {size} on {device}, expected a multiple of 8 for slots on a GPU"
            )


def check_head_windows(windows: int, device: torch.device) -> None:
    """Raises if more heads have windows of their own than the CUDA kernels take as parameters."""
    if device.type == "cuda" and windows > _MOST_HEAD_WINDOWS:
        raise ValueError(
            f"keep_window_size: got {windows} sizes on {device}, expected at most {_MOST_HEAD_WINDOWS} there, or one"
        )


def as_row_indices(indices: Tensor, name: str, rows: int | None = None) -> Tensor:
    """Checks integers [rows], and returns them as a contiguous int32 tensor. rows: None: any number."""
    _check_row_indices(indices, name, rows)
    if indices.dtype == torch.int64:  # a number beyond int32 stays out of range
        indices = indices.clamp(-1, 2**31 - 1)
    return indices.to(torch.int32).contiguous()


def _check_row_indices(indices: Tensor, name: str, rows: int | None) -> None:
    check_tensor(indices, name)
    if indices.dim() != 1 or (rows is not None and indices.shape[0] != rows):
        expected = "one dimension" if rows is None else (rows,)
        raise ValueError(f"{name}: got shape {tuple(indices.shape)}, expected {expected}")
    if indices.dtype not in _INTEGERS:
        raise TypeError(f"{name}: got {indices.dtype}, expected torch.int32 or other integers")


def check_lengths(lengths: Tensor, name: str, rows: int, most: int, device: torch.device) -> None:
    """Raises unless `lengths` are integers [rows] from 0 to `most`.

    Values are checked on the CPU only, because reading them from a GPU would wait for it.
    """
    _check_row_indices(lengths, name, rows)
    check_on_device(lengths, name, device)
    if type(lengths) is not Tensor or device.type != "cpu" or torch.compiler.is_compiling():
        return
    for row, number in enumerate(lengths.tolist()):
        if not 0 <= number <= most:
            raise ValueError(f"{name}[{row}]: got {number}, expected 0 to {most}")


def rows_on_host(rows: Tensor, numbers: Iterable[int]) -> dict[int, int]:
    """Returns the row of each sequence in `numbers`.

    The result is empty if reading the rows would wait for a device, or if they have no values.
    """
    if type(rows) is not Tensor or not rows.is_cpu or torch.compiler.is_compiling():
        return {}
    values = rows.tolist()
    return {number: values[number] for number in numbers}


def check_rows_differ(host_rows: dict[int, int]) -> None:
    if len(set(host_rows.values())) == len(host_rows):
        return  # most calls end here, which takes a quarter of the time
    numbers: dict[int, int] = {}
    for number, row in host_rows.items():
        other = numbers.setdefault(row, number)
        if row >= 0 and other != number:
            raise ValueError(
                f"rows[{number}]: got {row}, which rows[{other}] is, expected no row twice"
            )


def refuse_gradients(**tensors: Tensor | None) -> None:
    refuse_transforms(**tensors)
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(
                f"{name}: got a tensor that requires a gradient, expected none: a KV cache changes in place and has no "
                "derivative. Generate under torch.inference_mode() or torch.no_grad()"
            )
