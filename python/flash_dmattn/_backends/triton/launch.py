"""Launches of the kernels on torch tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._core.checks import MASK_VALUE
from ..._core.gradients import gradient_limit
from . import configs
from .backward import BiasSums, Statistics, delta_kernel, query_gradient_kernel
from .backward_bias import bias_gradient_kernel
from .backward_keys import key_gradient_kernel
from .forward import forward_kernel
from .range_check import range_kernel
from .tile_lists import TileLists, build_tile_lists, lifetime_order
from .tiles import LARGEST_PLAIN, Broadcast, Intervals, Rows, Shape

_ROWS_AT_ONCE = 64  # of the kernels that only read rows
_BIAS_CHUNK = 2048  # keys of a row of dbias for one program: enough programs, long enough a loop


class Problem:
    """The arguments of a call as the kernels take them."""

    def __init__(self, q, k, v, mask, bias, key_intervals, key_bound, is_causal, scale, softcap):
        batch, seqlen_q, heads_q, head_dim = q.shape
        seqlen_k, heads_kv = k.shape[1:3]
        self.batch, self.heads_kv, self.dtype, self.device = batch, heads_kv, q.dtype, q.device
        self.q, self.k, self.v = rows(q), rows(k), rows(v)
        causal_reach = seqlen_k - seqlen_q
        self.intervals, self.key_bound = None, key_bound
        if key_intervals is not None:
            self.intervals = key_intervals.contiguous()
            if is_causal:
                self.intervals = _causal_intervals(self.intervals, causal_reach)
        self.shape = Shape(
            seqlen_q,
            seqlen_k,
            heads_q,
            heads_q // max(heads_kv, 1),
            head_dim,
            causal_reach if is_causal and key_intervals is None else seqlen_k,
            scale,
            softcap,
            0.0 if bias is None else MASK_VALUE[bias.dtype],
            product_precision(q),
        )
        self.mask = self.bias = Broadcast(q, 0, 0, 0, 0, 0)
        self.mask_kind = self.bias_kind = 0
        if mask is not None:
            self.mask, self.mask_kind = broadcast(mask.view(torch.uint8), q)
        if bias is not None:
            self.bias, self.bias_kind = broadcast(bias, q)
        block_d = max(16, triton.next_power_of_2(head_dim))
        # Every launch gets these options. Triton 3.9 warns that the next one will not contract products and sums by default.
        self.common = {
            "BLOCK_D": block_d,
            "EVEN_D": block_d == head_dim,
            "enable_fp_fusion": True,
        }
        self.options = {
            "MASK": self.mask_kind,
            "BIAS": self.bias_kind,
            "SOFTCAP": softcap > 0,
        }

    def inputs(self) -> tuple:
        """Returns the first arguments of kernels. Without intervals they have a tensor that is never read."""
        intervals = Intervals(self.q.data, 0, 0)
        if self.intervals is not None:
            batch, heads, seqlen_k, _ = self.intervals.shape
            strides = (heads * seqlen_k * 2 if batch > 1 else 0, seqlen_k * 2 if heads > 1 else 0)
            intervals = Intervals(self.intervals, *strides)
        return self.q, self.k, self.v, self.mask, self.bias, intervals

    def tile_lists(self) -> tuple[TileLists, dict]:
        """Returns the tile lists and their keyword of a launch. Without intervals the lists are never read."""
        keywords = {"LISTED": self.intervals is not None}
        if self.intervals is None:
            return TileLists(*(self.q.data,) * 4, 0, 0), keywords
        return build_tile_lists(self.intervals, self.shape.seqlen_q, self.key_bound), keywords

    def config(self, kernel: str, fp64: bool = False) -> configs.Config:
        return configs.choose_config(
            kernel,
            self.dtype,
            self.common["BLOCK_D"],
            fp64=fp64,
            little_shared=configs.has_little_shared_memory(self.device),
        )

    def plain_and_fp64(self, kernel: str):
        """Returns (configuration, keywords of the launch) of the plain and the fp64 form of a kernel."""
        for fp64 in (False, True):
            config = self.config(kernel, fp64)
            options = {**self.options, **self.common}
            if fp64:  # the most general form: fewer kernels to compile
                options |= {"EVEN_D": False}
                options |= {name: 2 for name in ("MASK", "BIAS") if options[name]}
            yield (
                config,
                options
                | {
                    "FP64": fp64,
                    "M": config.queries,
                    "N": config.keys,
                    "num_warps": config.warps,
                    "num_stages": config.stages,
                },
            )


def product_precision(q: Tensor) -> tl.constexpr:
    """Returns "tf32" for float32 on an NVIDIA GPU if torch's flag permits it, else "ieee", so that other kernels
    do not depend on the flag.

    Each of torch's settings sets fp32_precision. Reading allow_tf32 raises after that one was set.
    """
    nvidia = q.device.type == "cuda" and torch.version.hip is None
    permitted = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return tl.constexpr("tf32" if q.dtype == torch.float32 and nvidia and permitted else "ieee")


def rows(tensor: Tensor) -> Rows:
    return Rows(tensor, *tensor.stride())


def broadcast(tensor: Tensor, q: Tensor) -> tuple[Broadcast, int]:
    """Returns the view of a mask or bias, and whether it is one per key (1) or dense (2)."""
    batch, head, query, key = (
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    per_query_head = tensor.shape[1] == q.shape[2]
    view = Broadcast(
        tensor, batch, head if per_query_head else 0, 0 if per_query_head else head, query, key
    )
    return view, 1 if tensor.shape[2] == 1 else 2


def _causal_intervals(intervals: Tensor, reach: int) -> Tensor:
    """Intersects with causality: key j from row j - reach on."""
    first, last = intervals.unbind(-1)
    diagonal = torch.arange(first.shape[-1], device=first.device, dtype=torch.int32) - reach
    return torch.stack([torch.maximum(first, diagonal), last], dim=-1)


def range_flags(problem: Problem, *tensors: tuple[Rows, int]) -> Tensor:
    """Returns int32 [B, Hkv], 1 for heads that the fp64 kernels compute. tensors: (rows, sequence length)."""
    shape = problem.shape
    # The kernels check q . k, one of the two factors of a score.
    factor = shape.scale / shape.softcap if shape.softcap > 0 else shape.scale
    all_fp64 = abs(factor) > LARGEST_PLAIN.value or shape.softcap > LARGEST_PLAIN.value
    flags = torch.full(
        (problem.batch, problem.heads_kv),
        int(all_fp64),
        dtype=torch.int32,
        device=problem.device,
    )
    for x, seqlen in tensors:
        heads = x.data.shape[2]
        blocks = problem.batch * heads * triton.cdiv(seqlen, _ROWS_AT_ONCE)
        if blocks:
            range_kernel[(blocks,)](
                x,
                seqlen,
                heads,
                heads // problem.heads_kv,
                flags,
                shape,
                BLOCK=_ROWS_AT_ONCE,
                **problem.common,
            )
    return flags


def forward(problem: Problem, saturate: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns out, lse, lse_low, and the flags of the heads that were computed in fp64."""
    p, shape = problem, problem.shape
    out = torch.empty(p.q.data.shape, dtype=p.dtype, device=p.device)
    lse = out.new_empty((p.batch, shape.heads_q, shape.seqlen_q), dtype=torch.float32)
    lse_low = torch.empty_like(lse)
    flags = range_flags(p, (p.q, shape.seqlen_q), (p.k, shape.seqlen_k), (p.v, shape.seqlen_k))
    heads = p.batch * shape.heads_q
    if heads and shape.seqlen_q:
        tile_lists, listed = p.tile_lists()
        for config, keywords in p.plain_and_fp64(
            "forward" if p.intervals is None else "forward by list"
        ):
            forward_kernel[(heads * triton.cdiv(shape.seqlen_q, config.queries),)](
                *p.inputs(),
                tile_lists,
                rows(out),
                lse,
                lse_low,
                flags,
                shape,
                torch.finfo(p.dtype).max,
                SATURATE=saturate,
                **listed,
                **keywords,
            )
    return out, lse, lse_low, flags


def backward(problem, dout, out, lse, lse_low, flags, dlse, saturate, needs) -> list[Tensor | None]:
    """Returns the gradients of q, k, v and bias, None for those that are not needed."""
    p, shape = problem, problem.shape
    need_dq, need_dk, need_dv, need_dbias = needs
    bias = p.bias.data if need_dbias else None
    by_rows = need_dbias and bias.shape[2] > 1 and bias.shape[3] == 1
    by_keys = need_dbias and bias.shape[2] == 1
    by_elements = need_dbias and not by_rows and not by_keys
    heads = p.batch * shape.heads_q
    if heads == 0:
        parts = (p.q.data, p.k.data, p.v.data, bias)
        return [torch.zeros_like(t) if n else None for t, n in zip(parts, needs, strict=True)]

    delta = torch.empty_like(lse)
    flags = flags.clone()
    if dlse is None:
        statistics = Statistics(lse, lse_low, delta, lse, 0)
    else:
        if saturate:  # like an element of dout
            dlse = torch.where(dlse.isfinite(), dlse, 0.0)
        statistics = Statistics(lse, lse_low, delta, dlse.contiguous(), shape.seqlen_q)
    if shape.seqlen_q:
        config = p.config("delta")
        delta_kernel[(heads * triton.cdiv(shape.seqlen_q, config.queries),)](
            rows(dout), rows(out), statistics, flags, shape, M=config.queries, **p.common
        )

    dq = torch.empty(p.q.data.shape, dtype=p.dtype, device=p.device)
    dk = dq.new_empty(p.k.data.shape)
    dv = torch.empty_like(dk)
    sums = BiasSums(
        lse.new_empty((p.batch, shape.heads_q, shape.seqlen_k) if by_keys else 1),
        lse.new_empty(lse.shape if by_rows else 1),
    )
    inputs, row_tensors = p.inputs(), (rows(out), rows(dout), statistics)
    limits = (gradient_limit(p.dtype), gradient_limit(p.dtype))
    if (need_dq or by_rows) and shape.seqlen_q:
        tile_lists, listed = p.tile_lists()
        for config, keywords in p.plain_and_fp64("dq"):
            query_gradient_kernel[(heads * triton.cdiv(shape.seqlen_q, config.queries),)](
                *inputs,
                tile_lists,
                *row_tensors,
                rows(dq),
                sums,
                flags,
                shape,
                *limits,
                SUM_ROWS=by_rows,
                SATURATE=saturate,
                **listed,
                **keywords,
            )
    if (need_dk or need_dv or by_keys) and shape.seqlen_k:
        order = p.q.data if p.intervals is None else lifetime_order(p.intervals)
        for config, keywords in p.plain_and_fp64("dkdv"):
            key_gradient_kernel[(p.batch * p.heads_kv * triton.cdiv(shape.seqlen_k, config.keys),)](
                *inputs,
                order,
                *row_tensors,
                rows(dk),
                rows(dv),
                sums,
                flags,
                shape,
                *limits,
                BY_INTERVALS=p.intervals is not None,
                SUM_KEYS=by_keys,
                SATURATE=saturate,
                **keywords,
            )
    dbias = None
    if by_keys or by_rows:
        total = sums.keys[:, :, None] if by_keys else sums.rows[..., None]
        dbias = _reduce_bias_sums(total, bias, p.heads_kv, saturate)
    elif by_elements:
        dbias = _bias_gradient(p, row_tensors, flags, saturate)
    return [dq if need_dq else None, dk if need_dk else None, dv if need_dv else None, dbias]


def _reduce_bias_sums(total: Tensor, bias: Tensor, heads_kv: int, saturate: bool) -> Tensor:
    """Reduces the fp32 sums of all heads, [B, Hq, ., .], to the shape and dtype of the bias."""
    if bias.shape[1] not in (1, total.shape[1]):
        total = total.unflatten(1, (heads_kv, -1)).sum(2)
    total = total.sum_to_size(bias.shape)
    if saturate:
        limit = gradient_limit(bias.dtype)
        total = total.nan_to_num(limit, limit, -limit).clamp(-limit, limit)
    return total.to(bias.dtype)


def _bias_gradient(p: Problem, row_tensors: tuple, flags: Tensor, saturate: bool) -> Tensor:
    shape, bias = p.shape, p.bias.data
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=p.device)
    for config, keywords in p.plain_and_fp64("dbias"):
        chunks = triton.cdiv(shape.seqlen_k, _BIAS_CHUNK)
        blocks = (
            bias.shape[0] * bias.shape[1] * triton.cdiv(shape.seqlen_q, config.queries) * chunks
        )
        if blocks == 0:
            return dbias
        keywords.pop("BIAS")
        bias_gradient_kernel[(blocks,)](
            *p.inputs(),
            *row_tensors,
            dbias,
            flags,
            shape,
            p.batch,
            bias.shape[0],
            bias.shape[1],
            gradient_limit(bias.dtype),
            BY_INTERVALS=p.intervals is not None,
            SATURATE=saturate,
            CHUNK=_BIAS_CHUNK,
            **keywords,
        )
    return dbias
