"""Dynamic mask attention: exact attention over the keys that a learned score selects, in O(N w)."""

from importlib import metadata as _metadata

from ._core import autograd, fake_kernels, torch_registrations  # noqa: F401
from ._core.availability import Backend, backends, get_available_backends, is_available
from .budgets import KeyBudgets
from .forgetting import forgetting_attention
from .functional import (
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    flex_dmattn_func,
    triton_dmattn_func,
)
from .generation.cache import KVSlots
from .generation.ragged import extend_ragged
from .generation.ragged_batch import RaggedBatch
from .generation.with_kvcache import flash_dmattn_with_kvcache
from .keys.intervals import KeyIntervals, intersect
from .keys.patterns import from_padding, packed_documents, prefix_lm, sliding_window
from .keys.rule import KeyRule
from .keys.select import select_key_intervals, select_keys
from .layers import DynamicMaskAttention, ScoreBudget
from .merge import merge_attention
from .scores import make_scores, score_projection, with_zero_sum_gradient
from .triangle import triangle_attention

torch_registrations.register()

try:
    __version__ = _metadata.version("flash-dmattn")
except _metadata.PackageNotFoundError:  # used from a source tree
    __version__ = "0+source"


def __getattr__(name: str):
    """Returns CPU_AVAILABLE, CUDA_AVAILABLE, TRITON_AVAILABLE or FLEX_AVAILABLE, determined at first use.

    They are not determined at import, and are not in __all__: once a process has initialised CUDA, its forked
    children cannot use the GPU.
    """
    backend, suffix, rest = name.partition("_AVAILABLE")
    if suffix and not rest and backend in ("CPU", "CUDA", "TRITON", "FLEX"):
        return is_available(backend.lower())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Backend",
    "DynamicMaskAttention",
    "KVSlots",
    "KeyBudgets",
    "KeyIntervals",
    "KeyRule",
    "RaggedBatch",
    "ScoreBudget",
    "backends",
    "extend_ragged",
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_varlen_func",
    "flash_dmattn_with_kvcache",
    "flex_dmattn_func",
    "forgetting_attention",
    "from_padding",
    "get_available_backends",
    "intersect",
    "is_available",
    "make_scores",
    "merge_attention",
    "packed_documents",
    "prefix_lm",
    "score_projection",
    "select_key_intervals",
    "select_keys",
    "sliding_window",
    "triangle_attention",
    "triton_dmattn_func",
    "with_zero_sum_gradient",
]
