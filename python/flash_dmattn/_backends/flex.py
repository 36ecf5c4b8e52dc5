"""The FlexAttention backend: torch.nn.attention.flex_attention with our masks and biases."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .._core.checks import MASK_VALUE, may_read
from .._core.gradients import narrow_gradient
from .._core.numerics import Numerics
from ..keys.visible import Visible

_BLOCK = 128  # queries and keys of a block of the BlockMask
_COMPILED_FORMS = 256  # the most forms of calls whose kernels stay compiled
# Below 128 queries torch 2.10 to 2.13 take their decoding kernel, which raises for lengths that are not a power of 2
# because it has no tiles for them.
_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
# torch keeps tiles of dense mask and bias in shared memory for every stage of its pipelines: with its own number of
# stages 278 KB at head dimension 128, but an H200 has 227 KB.
_DENSE_OPTIONS = _OPTIONS | {"bwd_num_stages": 1}
# Up to head dimension 64 the forward has two stages, too.
_NARROW_DENSE_OPTIONS = _DENSE_OPTIONS | {"fwd_num_stages": 2}
# Tiles of a float32 bias are twice as large: two stages of the forward are 272 KB at head dimension 64.
_FLOAT32_DENSE_OPTIONS = _DENSE_OPTIONS | {"fwd_num_stages": 1}
# The end of the scores' range: times log2(e) it is still within fp32.
_LARGEST_SCORE = 1e38
# Smaller biases cost few digits of q . k, and are added as they are.
_SMALL_LEVEL = 1024.0
# Larger biases leave no digits for q . k.
_LARGEST_LEVEL = 2.0**24
_STEP_ELEMENTS = 2**24  # biases in one step of `_row_levels`, which limits its temporaries


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    visible: Visible,
    numerics: Numerics,
) -> tuple[Tensor, Tensor | None]:
    """Computes out and the statistics [1, B, Hq, Sq], which are lse, for arguments in normal form.

    On the CPU, torch gives no lse, and statistics is None.
    """
    _refuse_arguments(q, k, v, bias, numerics)
    value_dim = v.shape[3]
    heads_q, heads_kv = q.shape[2], k.shape[2]
    # torch's kernels would spread inf and NaN to rows of the tile that do not see them.
    undefined = [~t.isfinite().all(-1) for t in (q, k)]
    q, k = (
        _Saturated.apply(t, partial(_signs_of_infinities, undefined=rows))
        for t, rows in zip((q, k), undefined, strict=True)
    )
    v = _Saturated.apply(v, _limit_values)
    bias = None if bias is None else _Saturated.apply(bias, None)
    if bias is not None and bias.requires_grad and bias.shape[2] == bias.shape[3] == 1:
        # torch's kernels do not compile the gradient of a number per head: it becomes one per query, of two at least.
        bias = bias.expand(-1, -1, max(2, q.shape[1]), 1).contiguous()
    q, k, v = map(_pad_head_dim, (q, k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    levels = None if bias is None else _row_levels(bias.detach(), visible, q.shape[2])
    form = tuple(map(_layout_of, (q, k, v, bias, visible.mask, _intervals_of(visible))))
    out, aux = compiled_flex(
        q,
        k,
        v,
        form=(*form, visible.is_causal, *numerics),
        **flex_mask_options(
            q,
            k,
            bias,
            visible,
            numerics.softcap,
            [rows.transpose(1, 2) for rows in undefined],
            levels,
        ),
        scale=numerics.scale,
        enable_gqa=heads_q > heads_kv,
        return_aux=AuxRequest(lse=q.device.type != "cpu"),
    )
    out = _SanitisedOutput.apply(out.transpose(1, 2)[..., :value_dim])
    lse = aux.lse
    if lse is not None and levels is not None:
        group = heads_q // levels.shape[1] if levels.shape[1] > 1 else 1
        lse = lse + levels[:, :, : lse.shape[2], 0].repeat_interleave(group, 1)
    return out, None if lse is None else lse.unsqueeze(0)


def _row_levels(bias: Tensor, visible: Visible, queries: int) -> Tensor:
    """Returns the largest visible bias up to 2^24 of each row if it exceeds 1,024 in magnitude, else 0.
    float32 [B or 1, H, Sq or 1, 1].

    The softmax of a row does not change if its level is subtracted from its biases. torch's kernels, which add biases
    to q . k, then keep the digits of biases that are large and close. A mask counts if it has no more heads and
    dimensions than the bias.
    """
    mask, intervals, keys = visible.mask, _intervals_of(visible), bias.shape[3]
    if mask is not None and any(m not in (1, n) for m, n in zip(mask.shape, bias.shape, strict=True)):  # fmt: skip
        mask = None
    number = torch.arange(keys, device=bias.device)
    reach = keys - queries if visible.is_causal else keys
    if keys > 1 and bias.shape[2] > 1:
        levels = bias.new_zeros((*bias.shape[:3], 1), dtype=torch.float32)
        if may_read() and torch.stack(bias.aminmax()).abs().max() <= _SMALL_LEVEL:
            return levels
        # Compiled code makes no copies.
        step = queries if is_compiling() else max(1, _STEP_ELEMENTS * queries // bias.numel())
        for begin in range(0, queries, step):
            rows = slice(begin, begin + step)
            some = bias[:, :, rows]
            row = torch.arange(queries, device=bias.device)[rows, None]
            shown = (some.abs() <= _LARGEST_LEVEL) & (number <= row + reach)
            if mask is not None:
                shown = shown & (mask[:, :, rows] if mask.shape[2] > 1 else mask)
            levels[:, :, rows] = some.where(shown, -math.inf).amax(3, keepdim=True).float()
    else:
        shown = bias.abs() <= _LARGEST_LEVEL  # a bias that masks is below all others
        values = bias.where(shown if mask is None else shown & mask, -math.inf)
        levels = values.amax(3, keepdim=True).float()
        if keys > 1 and (visible.is_causal or intervals is not None):
            first = (number - reach).clamp(min=0).expand(1, 1, -1)
            last = torch.full_like(first, queries)
            if intervals is not None:
                first, last = torch.maximum(first, intervals[..., 0]), intervals[..., 1].long()
                if 1 < first.shape[1] < bias.shape[1]:
                    group = bias.shape[1] // first.shape[1]
                    first, last = (t.repeat_interleave(group, 1) for t in (first, last))
            levels = _largest_over_intervals(values[:, :, 0].float(), first, last, queries)
            levels = levels[..., None]
    return levels.masked_fill(~(levels.abs() > _SMALL_LEVEL) | (levels == -math.inf), 0)


def _largest_over_intervals(values: Tensor, first: Tensor, last: Tensor, rows: int) -> Tensor:
    """Returns float32 [B, H, rows]: the largest of the values whose interval has the row, -inf where none has. values,
    first, last: [B or 1, H or 1, Sk].

    Each interval is two intervals of the largest power of 2 that it holds, which may overlap. O(Sk + rows log rows).
    """
    last = last.clamp(max=rows)
    values = values.masked_fill(first >= last, -math.inf)
    values, first, last = torch.broadcast_tensors(values, first, last)
    octave = (last - first).clamp(min=1).double().frexp().exponent.long() - 1
    octaves = max(rows, 1).bit_length()
    largest = values.new_full((*values.shape[:2], octaves * rows), -math.inf)
    for begin in (first, last - (1 << octave)):
        at = octave * rows + begin.clamp(0, rows - 1)
        largest = largest.scatter_reduce(2, at, values, "amax")
    level, *halves = largest.unflatten(2, (octaves, rows)).flip(2).unbind(2)
    for octave, half in zip(range(octaves - 2, -1, -1), halves, strict=True):
        moved = F.pad(level, (1 << octave, 0), value=-math.inf)[..., :rows]
        level = torch.maximum(half, torch.maximum(level, moved))
    return level


def _pad_head_dim(tensor: Tensor) -> Tensor:
    """Pads the head dimension to 16 or a larger power of 2, as torch's kernels require."""
    head_dim = tensor.shape[3]
    padding = max(16, 1 << (head_dim - 1).bit_length()) - head_dim
    return F.pad(tensor, (0, padding)) if padding else tensor


def flex_mask_options(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    visible: Visible,
    softcap: float = 0.0,
    undefined: list[Tensor] | None = None,
    levels: Tensor | None = None,
) -> dict[str, object]:
    """Returns the keyword arguments of flex_attention. q, k: [B, H, S, D]; the others in normal form.

    undefined: which rows of q and k had inf or NaN, bool [B, H, S], and are now the signs of their inf.
    levels: what is subtracted from the biases of each row, as _row_levels returns it.
    """
    score_mod, mask_mod = _score_and_mask_mods(q, k, bias, visible, softcap, undefined, levels)
    block_mask = BlockMask.from_kv_blocks(
        *_blocks(q, k, bias, visible),
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(q.shape[2], k.shape[2]),
    )
    options = _kernel_options(visible.mask, bias, q.shape[3])
    return {"score_mod": score_mod, "block_mask": block_mask, "kernel_options": options}


def _kernel_options(mask: Tensor | None, bias: Tensor | None, head_dim: int) -> dict[str, object]:
    dense = [t for t in (mask, bias) if t is not None and t.shape[2] > 1 and t.shape[3] > 1]
    if not dense:
        return _OPTIONS
    if any(t.dtype == torch.float32 for t in dense):
        return _FLOAT32_DENSE_OPTIONS
    return _NARROW_DENSE_OPTIONS if head_dim <= 64 else _DENSE_OPTIONS


def compiled_flex(*arguments, form: tuple = (), **options):
    """Calls FlexAttention, compiled once for each form. form: everything that the kernels are compiled for."""
    if is_compiling():
        return _attend(*arguments, **options)
    return _compiled_flex_attention((*form, torch.is_grad_enabled()))(*arguments, **options)


def _layout_of(tensor: Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _refuse_arguments(q, k, v, bias, numerics: Numerics) -> None:
    if not numerics.saturate:
        raise NotImplementedError(
            "nonfinite: got 'propagate' for FlexAttention, expected 'saturate': in torch's kernels inf and NaN also reach "
            "rows that do not see them; flash_dmattn_func and triton_dmattn_func propagate them"
        )
    wanted = [t is not None and t.requires_grad for t in (q, k, v, bias)]
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(wanted):
        raise NotImplementedError(
            "query, key, value, attn_bias: got a tensor on cpu that requires a gradient, expected none: torch's FlexAttention "
            "has no backward on the CPU. Use flash_dmattn_func there, or torch.no_grad()"
        )
    if q.dtype == torch.float64:
        raise TypeError("query: got float64, expected float32, bfloat16 or float16")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(
            f"query, key: got shapes {tuple(q.shape)}, {tuple(k.shape)}, expected no dimension of size 0"
        )
    if numerics.deterministic and wanted[3]:
        raise NotImplementedError(
            "deterministic: got True with a bias that requires a gradient, expected False: torch's FlexAttention adds the "
            "gradients of a bias in an order that varies"
        )


class _Saturated(torch.autograd.Function):
    """Applies `cleaned`. The gradient passes through unchanged and saturates."""

    @staticmethod
    def forward(ctx, x, cleaned):
        return x.view_as(x) if cleaned is None else cleaned(x)

    @staticmethod
    def backward(ctx, gradient):
        return narrow_gradient(gradient, gradient.dtype, saturate=True), None


class _SanitisedOutput(torch.autograd.Function):
    """Output that saturates, whose gradients count as 0 where they are not finite."""

    @staticmethod
    def forward(ctx, x):
        return _limit_values(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.nan_to_num(0, 0, 0)


def _limit_values(x: Tensor) -> Tensor:
    limit = torch.finfo(x.dtype).max
    return x.nan_to_num(limit, limit, -limit)


def _signs_of_infinities(x: Tensor, undefined: Tensor) -> Tensor:
    """Replaces rows of x with inf or NaN, which `undefined` marks. A row with inf becomes the signs of its infinities,
    other elements 0; a row with NaN becomes 0. Its product has the sign of the infinite result, and is 0 if that
    would be NaN (0 * inf included); inf - inf has either sign."""
    signs = torch.where(x.isinf(), x.sign(), 0)
    signs = torch.where(x.isnan().any(-1, keepdim=True), 0, signs)
    return torch.where(undefined[..., None], signs, x)


@lru_cache(_COMPILED_FORMS)
def _compiled_flex_attention(form: tuple) -> Callable:
    """Returns a function of its own for each form of a call, which is only the key of the cache.

    torch compiles the code of a function 8 times at most, and then runs it uncompiled, with N x N tensors. A copy of
    the code has a count of its own, so that no setting of torch has to change. fullgraph: an error instead of a function
    that runs uncompiled.
    """
    attend = FunctionType(_attend.__code__.replace(), globals())
    return torch.compile(attend, dynamic=False, fullgraph=True)


def _attend(q, k, v, **options):
    return flex_attention(q, k, v, **options)


def _score_and_mask_mods(q, k, bias, visible, softcap, undefined, levels):
    """Returns FlexAttention's score_mod and mask_mod."""
    mask, is_causal, intervals = visible.mask, visible.is_causal, _intervals_of(visible)
    heads_q, heads_kv, seqlen_q, seqlen_k = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    group, reach = heads_q // heads_kv, seqlen_k - seqlen_q
    hiding_bias = None if bias is None else bias.detach()

    def element(tensor, b, h, i, j):
        """Returns element (b, h, i, j) of a tensor that may broadcast, [B or 1, Hq or Hkv or 1, Sq or 1, Sk or 1]."""
        head = h if tensor.shape[1] == heads_q else h // group
        zero = 0 * b  # torch 2.10 cannot index by integers and tensors together
        return tensor[
            b if tensor.shape[0] > 1 else zero,
            head if tensor.shape[1] > 1 else zero,
            i if tensor.shape[2] > 1 else zero,
            j if tensor.shape[3] > 1 else zero,
        ]

    def is_shown(b, h, i, j):
        shown = (i < seqlen_q) & (j < seqlen_k)
        if is_causal:
            shown = shown & (j <= i + reach)
        if mask is not None:
            shown = shown & element(mask, b, h, i, j)
        if hiding_bias is not None:
            shown = shown & (element(hiding_bias, b, h, i, j) > MASK_VALUE[bias.dtype])
        if intervals is not None:
            zero = 0 * b
            row = b if intervals.shape[0] > 1 else zero
            head = h // group if intervals.shape[1] > 1 else zero
            first, last = intervals[row, head, j, zero], intervals[row, head, j, zero + 1]
            shown = shown & (first <= i) & (i < last)
        return shown

    def score_mod(score, b, h, i, j):
        if undefined is not None:
            infinite = torch.where(score < 0, -math.inf, math.nan)
            infinite = torch.where(score > 0, math.inf, infinite)
            undefined_q, undefined_k = undefined[0][..., None], undefined[1][:, :, None]
            changed = element(undefined_q, b, h, i, j) | element(undefined_k, b, h, i, j)
            score = torch.where(changed, infinite, score)
        if softcap > 0:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            value = element(bias, b, h, i, j)
            score = score + (value if levels is None else value - element(levels, b, h, i, j))
        if undefined is None:
            return score
        score = torch.where(score.isnan(), -_LARGEST_SCORE, score)
        return score.clamp(-_LARGEST_SCORE, _LARGEST_SCORE)

    modified = undefined is not None or softcap > 0 or bias is not None
    return score_mod if modified else None, is_shown


def _intervals_of(visible: Visible) -> Tensor | None:
    return None if visible.intervals is None else visible.intervals.intervals


def _blocks(q, k, bias, visible):
    """Returns the four tensors of a BlockMask, which list partial and full blocks. Causality and intervals determine
    them; a mask or bias makes every full block partial. O((N / 128)^2)."""
    mask, is_causal, intervals = visible.mask, visible.is_causal, _intervals_of(visible)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    rows, columns = math.ceil(seqlen_q / _BLOCK), math.ceil(seqlen_k / _BLOCK)
    row_begin = torch.arange(rows, device=q.device)[:, None] * _BLOCK
    row_end = (row_begin + _BLOCK).clamp(max=seqlen_q)
    column_begin = torch.arange(columns, device=q.device) * _BLOCK
    shown = torch.ones(1, 1, rows, columns, dtype=torch.bool, device=q.device)
    # A block that reaches past the end has elements that do not exist.
    whole = shown & (row_begin + _BLOCK <= seqlen_q) & (column_begin + _BLOCK <= seqlen_k)
    if is_causal:
        reach = seqlen_k - seqlen_q
        shown = shown & (column_begin <= row_end - 1 + reach)
        whole = whole & (column_begin + _BLOCK - 1 <= row_begin + reach)
    if intervals is not None:
        padding = columns * _BLOCK - seqlen_k
        empty = intervals[..., 0] >= intervals[..., 1]
        first = intervals[..., 0].masked_fill(empty, seqlen_q)
        last = intervals[..., 1].masked_fill(empty, 0)
        first = F.pad(first, (0, padding), value=seqlen_q).unflatten(-1, (columns, _BLOCK))
        last = F.pad(last, (0, padding), value=0).unflatten(-1, (columns, _BLOCK))
        earliest, latest = first.amin(-1)[:, :, None], last.amax(-1)[:, :, None]
        shown = shown & (earliest < row_end) & (latest > row_begin)
        whole = (
            whole
            & (first.amax(-1)[:, :, None] <= row_begin)
            & (last.amin(-1)[:, :, None] >= row_end)
        )
        if intervals.shape[1] > 1:
            group = q.shape[1] // intervals.shape[1]
            shown, whole = (t.repeat_interleave(group, 1) for t in (shown, whole))
    if mask is not None or bias is not None:
        whole = torch.zeros_like(shown)
    return *_block_indices(shown & ~whole), *_block_indices(shown & whole)


def _block_indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of set blocks in each row, and the column indices with the set blocks first."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), columns.int()
