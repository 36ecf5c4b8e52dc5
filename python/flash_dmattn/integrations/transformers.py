"""Dynamic mask attention for transformers: a named attention implementation, and Doge models.

Importing this module registers the names "flash_dmattn" and "dynamic_mask_attention" with transformers' attention and
mask interfaces, and makes `DogeAttention` use it under these names:

    from flash_dmattn.integrations.transformers import enable_flash_dmattn

    model = enable_flash_dmattn(DogeForCausalLM.from_pretrained(...))

`from_pretrained(..., attn_implementation="flash_dmattn")` and `model.set_attn_implementation` work
too, for any model whose attention layers go through transformers' `AttentionInterface`. The second name is for models in
which transformers takes every name with "flash" in it for one of its own kernels.
"""

import functools
import types

import torch
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, modeling_utils
from transformers.models.doge.modeling_doge import DogeAttention, DogeModel, DogePreTrainedModel

from .._arguments import may_read, resolve_flag
from .doge import MASK_KIND, ROUNDED, doge_attention_forward, doge_scores
from .dynamic_mask_cache import DynamicMaskCache
from .flash_dynamic_mask_attention import flash_dynamic_mask_attention_forward
from .masks import keep_documents, key_interval_mask

__all__ = [
    "NAME",
    "DynamicMaskCache",
    "doge_scores",
    "enable_flash_dmattn",
    "key_interval_mask",
]

NAME = "flash_dmattn"
NAMES = (NAME, "dynamic_mask_attention")
_CACHE = "dynamic_mask"
_DEFAULT_CACHE = "_flash_dmattn_cache"  # attribute of a model
# Of DogeModel.forward; the last one in transformers 4 only.
_ARGUMENTS = (
    "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache", "cache_position",
)  # fmt: skip


def enable_flash_dmattn(
    model: torch.nn.Module,
    *,
    round_scores_like_eager: bool = False,
    cache: str | None = None,
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
        cache: "dynamic_mask" makes `DynamicMaskCache` the cache of calls that bring none and of `generate`, so that
            memory and time of a token do not grow with the text; None: that of transformers, which holds all keys.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no Doge attention layer, has attention dropout, or cannot have this cache.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    round_scores_like_eager = resolve_flag(round_scores_like_eager, "round_scores_like_eager")
    layers = [module for module in model.modules() if isinstance(module, DogeAttention)]
    if not layers:
        raise ValueError(f"model is a {type(model).__name__} without any DogeAttention layer")
    dropout = max(layer.attention_dropout for layer in layers)
    if dropout:
        raise ValueError(
            f"attention_dropout is {dropout}, which flash_dmattn does not have; expected 0: load the model with "
            "from_pretrained(..., attention_dropout=0.0), which changes nothing but its training"
        )
    if cache not in (None, _CACHE):
        raise ValueError(f"cache: got {cache!r}, expected {_CACHE!r} or None")
    for module in model.modules():
        if isinstance(module, DogePreTrainedModel):
            _set_default_cache(module, cache)
    for layer in layers:
        layer.config._attn_implementation = NAME
        setattr(layer, ROUNDED, round_scores_like_eager)
        if "_old_forward" in vars(layer):  # accelerate kept the method from before this import
            layer._old_forward = types.MethodType(DogeAttention.forward, layer)
    return model


def _set_default_cache(model: DogePreTrainedModel, cache: str | None) -> None:
    """The attribute for `generate`, and for calls of the model itself a hook."""
    if cache is not None:
        DynamicMaskCache(model.config)  # raises where it cannot be
    setattr(model, _DEFAULT_CACHE, cache)
    hooks = model._forward_pre_hooks.values()
    if isinstance(model, DogeModel) and cache is not None and _bring_default_cache not in hooks:
        model.register_forward_pre_hook(_bring_default_cache, with_kwargs=True)


def _has_default_cache(model: torch.nn.Module) -> bool:
    return (
        getattr(model, _DEFAULT_CACHE, None) == _CACHE
        and model.config._attn_implementation in NAMES
    )


def _bring_default_cache(model: DogeModel, args: tuple, options: dict) -> tuple[tuple, dict] | None:
    """Where DogeModel.forward would make transformers' own cache; not for training, which reads none."""
    use_cache = options.get("use_cache")
    if use_cache is None:
        use_cache = model.config.use_cache
    has_cache = len(args) > 3 or options.get("past_key_values") is not None
    if not use_cache or has_cache or torch.is_grad_enabled() or not _has_default_cache(model):
        return None
    return args, {**options, "past_key_values": DynamicMaskCache(model.config)}


def _generate_with_default_cache() -> None:
    """`generate` makes the cache of a model before it calls it."""
    prepare = GenerationMixin._prepare_cache_for_generation

    @functools.wraps(prepare)
    def prepare_ours(self, generation_config, model_kwargs, *args, **kwargs):
        given = model_kwargs.get("past_key_values"), generation_config.cache_implementation
        if (
            given == (None, None)
            and generation_config.use_cache is not False
            and _has_default_cache(self)
        ):
            cache = DynamicMaskCache(self.config)
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()
            model_kwargs["past_key_values"] = cache
            return None
        return prepare(self, generation_config, model_kwargs, *args, **kwargs)

    GenerationMixin._prepare_cache_for_generation = prepare_ours


def _teach_doge() -> None:
    """Under our names, DogeAttention.forward is `doge_attention_forward`, and DogeModel.forward tells its layers the
    kind of its mask."""
    forward, forward_of_model = DogeAttention.forward, DogeModel.forward

    @functools.wraps(forward)
    def dispatch(self, *args, **kwargs):
        ours = self.config._attn_implementation in NAMES
        return (doge_attention_forward if ours else forward)(self, *args, **kwargs)

    @functools.wraps(forward_of_model)
    def dispatch_model(self, *args, **kwargs):
        if self.config._attn_implementation in NAMES:
            given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
            _refuse_additive_padding(given.get("attention_mask"))
            kwargs[MASK_KIND] = _mask_kind(self, given)
        return forward_of_model(self, *args, **kwargs)

    DogeAttention.forward, DogeModel.forward = dispatch, dispatch_model


def _mask_kind(model: DogeModel, given: dict) -> str | None:
    """The kind of mask that transformers makes of a call's arguments: "causal", "padded" or "packed"; None: another.

    The mask itself shows it only to those who read its values. Compiled code cannot, and takes every mask for one of
    packed sequences with queries that see no key.
    """
    padding = given.get("attention_mask")
    has_window = getattr(model.config, "sliding_window", None) is not None
    has_cache = any(given.get(name) is not None for name in ("past_key_values", "cache_position"))
    if has_window or has_cache or not getattr(model.config, "is_causal", True):
        return None
    if padding is not None:
        return "padded" if isinstance(padding, torch.Tensor) and padding.dim() == 2 else None
    return "causal" if given.get("position_ids") is None else "packed"


def _refuse_additive_padding(padding: object) -> None:
    """transformers takes every number but 0 in a mask [B, S] for a token. Where none can be read, an additive mask is not
    told from one of ones and zeros, and neither is taken."""
    is_float = isinstance(padding, torch.Tensor) and padding.is_floating_point()
    if not is_float or padding.dim() > 3:
        return
    found = "whose numbers compiled code cannot read"
    if may_read():
        if not (padding < 0).any():
            return
        found = "with negative numbers"
    raise ValueError(
        f"attention_mask: got {padding.dtype} of shape {tuple(padding.shape)} {found}, expected bool or integers, nonzero "
        "for tokens and 0 for padding; an additive mask has four dimensions, [B, 1, S, S]"
    )


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
        if str(self.config._attn_implementation).removeprefix("paged|") in NAMES:
            raise ValueError(
                f"attn_implementation is {self.config._attn_implementation!r}; continuous batching (generate_batch) "
                "has a paged cache, which flash_dmattn does not support. Use generate, or another implementation"
            )
        return start(self, *args, **kwargs)

    GenerationMixin.init_continuous_batching = start_others


for _name in NAMES:
    AttentionInterface.register(_name, flash_dynamic_mask_attention_forward)
    AttentionMaskInterface.register(_name, key_interval_mask)
_teach_doge()
_generate_with_default_cache()
keep_documents()
_skip_flash_attention_preload()
_refuse_continuous_batching()
