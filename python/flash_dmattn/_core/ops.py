"""The C++ operators."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .load import NAMESPACE
from .signatures import Signature

operators = getattr(torch.ops, NAMESPACE)
forward = operators.forward.default
backward = operators.backward.default
select_and_attend = operators.select_and_attend.default
select_key_intervals = operators.select_key_intervals.default
score_projection = operators.score_projection.default
measure_key_bound = operators.measure_key_bound.default
build_tile_lists = operators.build_tile_lists.default
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


# torch.compile would trace into a cached function, and cannot trace an operator that returns text. The mark does what
# torch.compiler.assume_constant_result does, without importing the compiler: the import takes two seconds, and raises
# an error of its own if Triton is broken.
_has_cuda._dynamo_marked_constant = True


def has_kernels_for(tensor: Tensor) -> bool:
    """Whether the library projects scores, selects keys and builds tile lists on this tensor's device; if not,
    projection_in_torch.py and keys/in_torch.py do."""
    return tensor.is_cpu or tensor.is_meta or (tensor.is_cuda and _has_cuda())


FORWARD, BACKWARD, SELECT_AND_ATTEND = map(Signature, (forward, backward, select_and_attend))
