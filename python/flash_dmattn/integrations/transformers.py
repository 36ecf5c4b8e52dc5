"""Dynamic mask attention for transformers: a named attention implementation, and Doge models.

Importing this module registers the name "flash_dmattn" with transformers' attention and mask
interfaces, and makes `DogeAttention` use it under that name:

    from flash_dmattn.integrations.transformers import enable_flash_dmattn

    model = enable_flash_dmattn(DogeForCausalLM.from_pretrained(...))

`from_pretrained(..., attn_implementation="flash_dmattn")` and `model.set_attn_implementation` work
too, for any model whose attention layers go through transformers' `AttentionInterface`.
"""

import functools
import types
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationMixin,
    masking_utils,
    modeling_utils,
)
from transformers.models.doge import modeling_doge
from transformers.models.doge.modeling_doge import DogeAttention

from ..allowed_keys import intervals_of_mask, intervals_of_rows, split_additive, visible_counts
from ..key_intervals import KeyIntervals, select_key_intervals
from .flash_dynamic_mask_attention import flash_dynamic_mask_attention_forward
from .modeling_flash_dynamic_mask_attention_utils import as_key_intervals

NAME = "flash_dmattn"
_ROUNDED = "round_scores_like_eager"  # attribute of a layer


def enable_flash_dmattn(
    model: torch.nn.Module, *, round_scores_like_eager: bool = False
) -> torch.nn.Module:
    """Makes every Doge attention layer of a model choose its keys by intervals.

    No layer then builds a tensor with one element per (query, key) pair. Loss, gradients and generated
    tokens are those of `attn_implementation="eager"` to rounding, except where eager leaves the choice
    open: of equal scores (all of them in a fresh model, and those of equal tokens in the first layer)
    the more recent keys are kept. `model.set_attn_implementation("eager")` undoes it.

    In a 16-bit model the scores of keys are float32 all the same, so that the choice is the float32
    model's; eager attention rounds them, and its choice is partly noise.

    Args:
        model: a Doge model, or anything that contains its attention layers (a PEFT model, for one).
        round_scores_like_eager: scores in the model's dtype, to reproduce a run of eager attention.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no Doge attention layer.
    """
    layers = [module for module in model.modules() if isinstance(module, DogeAttention)]
    if not layers:
        raise ValueError(f"model is a {type(model).__name__} without any DogeAttention layer")
    dropout = max(layer.attention_dropout for layer in layers)
    if dropout:
        warnings.warn(
            f"attention_dropout is {dropout}: this model can infer, but its training will be refused, because "
            "flash_dmattn has no attention dropout; expected config.attention_dropout = 0",
            stacklevel=2,
        )
    for layer in layers:
        layer.config._attn_implementation = NAME
        setattr(layer, _ROUNDED, round_scores_like_eager)
        if "_old_forward" in vars(layer):  # accelerate kept the method from before this import
            layer._old_forward = types.MethodType(DogeAttention.forward, layer)
    return model


def key_interval_mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    cache_position: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **kwargs,
) -> torch.Tensor | None:
    """The attention mask of a model as key intervals; a function of transformers' mask interface.

    Args:
        batch_size, q_length, kv_length: B, Sq and Sk.
        q_offset, kv_offset: positions of the first query and key; or all query positions in
            `cache_position`, int [Sq] (transformers 4).
        mask_function: (batch, head, query position, key position) -> bool, on tensors that broadcast.
        attention_mask: padding, bool [B, positions], True for real tokens; missing ones are padding.
        allow_is_bidirectional_skip: a mask that allows everything may be None.
        use_vmap: `mask_function` is custom and takes scalars; its mask is built and then read.

    Returns:
        None where the `is_causal` of the layer is all of it; else int32 [B, 1, Sk, 2]; or, when no
        intervals describe the mask, bool [B, 1, Sq, Sk].
    """
    if use_vmap:
        mask = masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=True,
            device=device,
        )
        intervals = intervals_of_mask(mask)
        return mask if intervals is None else intervals.intervals

    query = cache_position
    if query is None:
        query = torch.arange(q_length, device=device) + q_offset
    key = torch.arange(kv_length, device=query.device) + kv_offset
    key_end = kv_length + kv_offset
    is_read = cache_position is not None or isinstance(q_offset, torch.Tensor)
    query_end = None if is_read else q_length + q_offset
    present = _present_keys(attention_mask, key, key_end)
    documents = getattr(mask_function, "causal_documents", None)

    if mask_function is masking_utils.causal_mask_function:
        if present is None and _end_together(query, key, query_end, key_end):
            return None
        first = torch.searchsorted(query, key)
    elif documents is not None:
        first = torch.arange(kv_length, device=query.device)
    elif mask_function is getattr(masking_utils, "bidirectional_mask_function", None):
        if present is None and allow_is_bidirectional_skip:
            return None
        first = torch.zeros_like(key)
    else:
        return _mask_of_function(mask_function, batch_size, query, key, present)

    if documents is None:
        rows = query.shape[0]  # not len(), which makes it a constant of torch.compile
        last = torch.where(first < rows, rows, 0)[None]
    else:
        last = torch.searchsorted(documents, documents, right=True)
    first, last = torch.broadcast_tensors(first.minimum(last), last)
    intervals = torch.stack([first, last], dim=-1).int()[:, None]
    if present is not None:
        intervals = intervals * present[:, None, :, None]
    return intervals.expand(batch_size, -1, -1, -1)


def _end_together(
    query: torch.Tensor, key: torch.Tensor, query_end: int | None, key_end: int
) -> bool:
    """Whether the last query stands at the last key; False where compiled code would have to read it.

    query_end: None where it has to be read.
    """
    if query_end is not None:
        return query_end == key_end
    return not torch.compiler.is_compiling() and bool(query[-1] == key[-1])


def _present_keys(
    padding: torch.Tensor | None, key: torch.Tensor, key_end: int
) -> torch.Tensor | None:
    """Which keys are real tokens, bool [B, Sk]; None when all are known to be."""
    if padding is None:
        return None
    missing = key_end - padding.shape[-1]
    if missing > 0:
        padding = F.pad(padding, (0, missing))
    present = padding[:, key].bool()
    return None if not torch.compiler.is_compiling() and present.all() else present


def _mask_of_function(
    mask_function: Callable,
    batch_size: int,
    query: torch.Tensor,
    key: torch.Tensor,
    present: torch.Tensor | None,
) -> torch.Tensor:
    """Sliding windows and custom masks: evaluated exactly, a block of rows at a time. Compiled code cannot find
    out whether intervals describe them, and takes the mask."""
    batch = torch.arange(batch_size, device=key.device)[:, None, None, None]
    head = torch.zeros_like(batch[:1])
    shape = torch.Size((batch_size, 1, len(query), len(key)))

    def rows(start: int, stop: int) -> torch.Tensor:
        block = mask_function(batch, head, query[None, None, start:stop, None], key)
        if present is not None:
            block = block & present[:, None, None]
        return block.expand(batch_size, 1, stop - start, len(key))

    compiling = torch.compiler.is_compiling()
    intervals = None if compiling else intervals_of_rows(rows, shape, key.device)
    return rows(0, len(query)).contiguous() if intervals is None else intervals.intervals


def _doge_attention_forward(
    self: DogeAttention,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values=None,
    cache_position: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """`DogeAttention.forward` with one score per key instead of a mask per (query, key) pair."""
    per_head = (*hidden_states.shape[:-1], -1, self.head_dim)
    query = self.q_norm(self.q_proj(hidden_states).view(per_head)).transpose(1, 2)
    key = self.k_norm(self.k_proj(hidden_states).view(per_head)).transpose(1, 2)
    value = self.v_proj(hidden_states).view(per_head).transpose(1, 2)
    query, key = modeling_doge.apply_rotary_pos_emb(query, key, *position_embeddings)
    if past_key_values is not None:
        where = () if cache_position is None else ({"cache_position": cache_position},)
        key, value = past_key_values.update(key, value, self.layer_idx, *where)

    # The scores of cached keys are computed again from their values: [B, Hkv, Sk].
    scores = doge_scores(self, self.dt_proj(value.transpose(1, 2).flatten(2)))

    mask = _doge_mask(attention_mask, query.shape[2], key.shape[2])
    window = self.keep_window_size
    if mask is None and key.shape[2] > window:
        mask = select_key_intervals(scores, window, query_length=query.shape[2])
        window = key.shape[2]  # chosen already
    out, _ = flash_dynamic_mask_attention_forward(
        self,
        query,
        key,
        value,
        mask,
        scores,
        scaling=self.scaling,
        window_size=window,
        dropout=self.attention_dropout if self.training else 0.0,
        output_attentions=kwargs.get("output_attentions"),
    )
    if attention_mask is not None:
        out = _fill_blind_rows(out, mask, query, key, value, self.scaling)
    return self.o_proj(out.flatten(2)), None


def doge_scores(attention: DogeAttention, step: torch.Tensor) -> torch.Tensor:
    """`exp(A · softplus(step))`: how much a key adds to its scores, and by which it is chosen.

    In 16 bits hundreds of keys share a few values, and rounding decides which of them are kept.

    Args:
        attention: a Doge attention layer.
        step: result of its `dt_proj`, [B, Sk, Hkv].

    Returns:
        [B, Hkv, Sk]: float32 (float64 in a float64 model), under autocast too; with
        `enable_flash_dmattn(..., round_scores_like_eager=True)` in the dtypes of eager attention.
    """
    if getattr(attention, _ROUNDED, False):
        return torch.exp(attention.A * F.softplus(step)).transpose(-1, -2)
    wide = torch.promote_types(step.dtype, torch.float32)
    return torch.exp(attention.A.to(wide) * F.softplus(step.to(wide))).transpose(-1, -2)


def _doge_mask(
    mask: torch.Tensor | None, query_length: int, key_length: int
) -> torch.Tensor | KeyIntervals | None:
    """A mask by the rule of Doge: in an additive one, every value but 0 masks."""
    intervals = as_key_intervals(mask, query_length)
    if mask is None or intervals is not None:
        return intervals

    def fit(pairs: torch.Tensor) -> torch.Tensor:
        if pairs.shape[2:] == (query_length, key_length):
            return pairs
        return pairs[..., :key_length].expand(-1, -1, query_length, -1)

    if query_length > 1:
        intervals = intervals_of_mask(fit(mask))
        if intervals is not None:
            return intervals
        if mask.is_floating_point():
            allowed, adds = split_additive(mask)
            if not adds:
                return fit(allowed)
    mask = fit(mask)
    return mask if mask.dtype == torch.bool else mask == 0


def _fill_blind_rows(
    out: torch.Tensor,
    mask: torch.Tensor | KeyIntervals,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Gives queries that may see no key the result of eager attention: the mean of all values.

    With padding on the left there are such queries, and they have an effect: the last one predicts
    the first token, and Doge's mixture of experts routes by all rows. Eager's softmax runs
    over equal fill values there, whose derivative by the scores is still that of a softmax,
    `d out = scaling / Sk * sum_j (v_j - mean) d(q . k_j)`: one D x D matrix per head.
    """
    blind = visible_counts(mask) == 0 if isinstance(mask, KeyIntervals) else ~mask.any(-1)
    if not torch.compiler.is_compiling() and not blind.any():
        return out
    groups = query.shape[1] // key.shape[1]
    mean = value.mean(2, keepdim=True)
    slope = (value - mean).detach().mT @ key * (scaling / key.shape[2])
    slope, mean = (t.repeat_interleave(groups, dim=1) for t in (slope, mean))
    change = query @ slope.mT
    filled = (mean + (change - change.detach())).transpose(1, 2).to(out.dtype)
    return torch.where(blind.transpose(1, 2)[..., None], filled, out)


def _teach_doge() -> None:
    """Under the name "flash_dmattn", DogeAttention.forward is `_doge_attention_forward`."""
    forward = DogeAttention.forward

    @functools.wraps(forward)
    def dispatch(self, *args, **kwargs):
        ours = self.config._attn_implementation == NAME
        return (_doge_attention_forward if ours else forward)(self, *args, **kwargs)

    DogeAttention.forward = dispatch


def _keep_documents() -> None:
    """The causal mask functions of packed sequences carry the document of every token, from which intervals follow
    without evaluating the function. In compiled models transformers takes every sequence for a packed one."""
    combine = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if combine is None:
        return

    @functools.wraps(combine)
    def combine_and_keep(mask_function, position_ids, packed_sequence_mask):
        combined = combine(mask_function, position_ids, packed_sequence_mask)
        if mask_function is masking_utils.causal_mask_function:
            combined.causal_documents = packed_sequence_mask
        return combined

    masking_utils.packed_sequence_compatibility_function = combine_and_keep


def _skip_flash_attention_preload() -> None:
    """transformers 5 loads the FlashAttention package for every name with "flash" in it; not for ours."""
    preload = modeling_utils.lazy_import_flash_attention

    @functools.wraps(preload)
    def preload_others(implementation, *args, **kwargs):
        return None if implementation == NAME else preload(implementation, *args, **kwargs)

    modeling_utils.lazy_import_flash_attention = preload_others


def _refuse_continuous_batching() -> None:
    """At its start: an error of a layer would only be logged by its thread, and the answers truncated."""
    start = getattr(GenerationMixin, "init_continuous_batching", None)
    if start is None:
        return

    @functools.wraps(start)
    def start_others(self, *args, **kwargs):
        if str(self.config._attn_implementation).removeprefix("paged|") == NAME:
            raise ValueError(
                f"attn_implementation is {self.config._attn_implementation!r}; continuous batching (generate_batch) "
                "has a paged cache, which flash_dmattn does not support. Use generate, or another implementation"
            )
        return start(self, *args, **kwargs)

    GenerationMixin.init_continuous_batching = start_others


AttentionInterface.register(NAME, flash_dynamic_mask_attention_forward)
AttentionMaskInterface.register(NAME, key_interval_mask)
_teach_doge()
_keep_documents()
_skip_flash_attention_preload()
_refuse_continuous_batching()
