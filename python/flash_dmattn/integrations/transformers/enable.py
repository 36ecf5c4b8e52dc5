"""`enable_flash_dmattn`: makes a Doge model choose its keys by intervals, and gives models pieces of sequences."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel
from transformers.models.doge.modeling_doge import (
    DogeAttention,
    DogeModel,
    DogePreTrainedModel,
)

from ..._core.checks import may_read, resolve_flag
from ...keys.recognise import Memo
from .._shared.config_rules import CONFIG_NAME
from .cache import DynamicMaskCache
from .compat import (
    CACHE,
    MODEL_ARGUMENTS,
    bind_arguments,
    find_cache,
    implementation_of,
    own_config,
    refuse_continuous_batching,
    set_cache_of_generate,
    store_name,
)
from .doge import Context, FlashDogeAttention
from .families import error_of, reason_to_refuse, warn_of_unknown, watch_text_model
from .learned_scores.layers import has_scores
from .mask_functions import is_causal_config, mask_kind
from .model_state import (
    CONTEXT,
    DOGE_NAME,
    NAME,
    NAMES,
    PIECES,
    SCORED_NAME,
    STORED_NAMES,
    add_hook,
)
from .scored_cache import check_cache

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_CACHE = "dynamic_mask"
_DEFAULT_CACHE = "_flash_dmattn_cache"  # attribute of a model


def enable_flash_dmattn(
    model: torch.nn.Module,
    *,
    round_scores_like_eager: bool = False,
    cache: str | None = None,
    context_parallel: ProcessGroup | DeviceMesh | None = None,
) -> torch.nn.Module:
    """Makes every Doge attention layer of a model choose its keys by intervals.

    No layer then builds a tensor with one element per (query, key) pair. Loss, gradients and generated
    tokens are those of `attn_implementation="eager"` to rounding. If scores are equal (all of them in a fresh model,
    those of equal tokens in the first layer), eager keeps any of their keys, and this attention the more recent ones.
    `model.set_attn_implementation("eager")` undoes it.

    In a 16-bit model the scores of keys are still float32, so that the model chooses as a float32 model does. Eager
    attention rounds the scores, which makes its choice partly noise.

    Only this model changes: its attention layers become `FlashDogeAttention`, with the same parameters and hooks, and its
    config becomes a copy, because others may share it.

    Args:
        model: a Doge model, or anything that contains its attention layers (a PEFT model, for one). With context_parallel also a
            Llama, Mistral, Qwen2 or Qwen3 with the scores of `add_learned_scores`, of which nothing else changes.
        round_scores_like_eager: whether scores have the model's dtype, to reproduce a run of eager attention.
        cache: "dynamic_mask" makes `DynamicMaskCache` the cache of `generate` and of calls without a cache, so that the
            memory and time for a token do not grow with the text. None keeps transformers' default cache of all keys.
        context_parallel: ProcessGroup, or DeviceMesh of one dimension (mesh["cp"]), whose ranks have consecutive pieces of
            every sequence, as `flash_dmattn.distributed.ContextParallel.shard` cuts them: calls get a piece's input_ids,
            position_ids and padding, and for the loss shift_labels and num_items_in_batch. None: whole sequences, again for
            a model with learned scores.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no Doge attention layer and no scores;
            it has scores, context_parallel is None, and it never had pieces;
            it has attention dropout; or its family cannot have this cache or pieces.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    round_scores_like_eager = resolve_flag(round_scores_like_eager, "round_scores_like_eager")
    pretrained = (m for m in model.modules() if isinstance(m, PreTrainedModel))
    scored = [module for module in pretrained if any(map(has_scores, module.modules()))]
    if scored and not any(isinstance(module, DogeAttention) for module in model.modules()):
        for name, value in (("round_scores_like_eager", round_scores_like_eager), ("cache", cache)):
            if value:
                raise ValueError(
                    f"{name}: got {value!r} for a model with learned scores, expected a Doge model"
                )
        if context_parallel is None and not any(hasattr(module, PIECES) for module in scored):
            raise ValueError(
                f"context_parallel: got None for a {type(model).__name__} with learned scores, expected a group or a mesh: its "
                "layers choose their keys already"
            )
        _set_pieces(scored, context_parallel)
        return model
    _check_layers(model)
    if cache not in (None, _CACHE):
        raise ValueError(f"cache: got {cache!r}, expected {_CACHE!r} or None")
    doge_models = [module for module in model.modules() if isinstance(module, DogePreTrainedModel)]
    if cache is not None:
        for module in doge_models:
            DynamicMaskCache(module.config)  # raises for a model without one
    replace_layers(model, round_scores_like_eager=round_scores_like_eager)
    for module in model.modules():
        if isinstance(module, FlashDogeAttention):
            store_name(module.config, DOGE_NAME)
    for module in doge_models:
        refuse_continuous_batching(module, STORED_NAMES)
        setattr(module, _DEFAULT_CACHE, cache)
        if cache is not None:
            set_cache_of_generate(module, _default_cache)
    _set_pieces([*doge_models, *scored], context_parallel)
    return model


def _set_pieces(models: list[PreTrainedModel], group) -> None:
    """Lets models get pieces of their sequences. group: None: models get whole sequences again."""
    pieces = check_labels = None
    if group is not None:
        from .context_parallel import ModelOfPieces, check_labels  # and torch.distributed

        pieces = ModelOfPieces(models, group)
    for model in models:
        setattr(model, PIECES, pieces)
        if pieces is not None:
            add_hook(model, check_labels)


def resolve_name(model: PreTrainedModel, name: str | None) -> str | None:
    """Returns the name that a config stores if `name` is one of this package's names, else None.

    Raises:
        ValueError: attention of this name would not equal the model's own, or would turn its learned scores off.
    """
    watch_text_model(model)
    _refuse_another_name(model, name)
    if hasattr(model.config, CONFIG_NAME) and not any(map(has_scores, model.modules())):
        warnings.warn(
            f"config: got one with {CONFIG_NAME} for a model without them, as from_pretrained makes it: the model attends to all keys "
            "until load_scores(model, folder)",
            stacklevel=3,
        )
    if name not in (*NAMES, DOGE_NAME):
        return None
    refuse_continuous_batching(model, STORED_NAMES)
    if any(isinstance(module, DogeAttention) for module in model.modules()):
        _check_layers(model)
        replace_layers(model)
        return DOGE_NAME
    reason = reason_to_refuse(model)
    if reason is not None:
        raise error_of(model, name, reason)
    warn_of_unknown(model)
    return NAMES[-1]


def _refuse_another_name(model: PreTrainedModel, name: str | None) -> None:
    """Raises for a name under which learned scores would choose no keys although their phase says that they do."""
    phases = {m.scoring.phase for m in model.modules() if has_scores(m)} - {"off"}
    if phases and name != SCORED_NAME:
        raise ValueError(
            f"attn_implementation: got {name!r} for a {type(model).__name__} with learned scores in the phase "
            f"{phases.pop()!r}, expected a model without them, as every key would be visible: call "
            'model.set_score_phase("off") or remove_learned_scores(model) first'
        )


def _check_layers(model: torch.nn.Module) -> None:
    """Raises if the attention layers of a model cannot be replaced."""
    layers = [module for module in model.modules() if isinstance(module, DogeAttention)]
    if not layers:
        raise ValueError(
            f"model: got a {type(model).__name__} without any DogeAttention layer, expected a Doge model. For exact attention "
            f'without scores, call model.set_attn_implementation("{NAME}")'
        )
    if model is layers[0]:
        raise ValueError(
            f"model: got a single {type(model).__name__}, expected the model that contains it"
        )
    for layer in layers:
        if type(layer) not in (DogeAttention, FlashDogeAttention):
            raise ValueError(
                f"model: got attention layers of class {type(layer).__name__}, expected DogeAttention itself; call "
                "enable_flash_dmattn before something else changes their class (fully_shard of the layer itself, for one)"
            )
    dropout = max(layer.attention_dropout for layer in layers)
    if dropout:
        raise ValueError(
            f"attention_dropout: got {dropout}, which flash_dmattn does not have, expected 0: load the model with "
            "from_pretrained(..., attention_dropout=0.0), which changes nothing but its training"
        )


def replace_layers(model: torch.nn.Module, **settings: bool) -> None:
    """Gives a model this package's Doge layers, and a config of its own."""
    own_config(model)
    for module in model.modules():
        if type(module) is DogeAttention:
            FlashDogeAttention.from_layer(module)
        if isinstance(module, FlashDogeAttention):
            vars(module).update(settings)
        if isinstance(module, DogeModel):
            add_hook(module, _begin_forward)


# ---- The beginning of a forward ---------------------------------------------------------------------


def _begin_forward(model: DogeModel, args: tuple, options: dict) -> tuple[tuple, dict] | None:
    """Adds the default cache and the context of the layers, before DogeModel.forward."""
    pieces = getattr(model, PIECES, None)
    if pieces is None and implementation_of(model.config) != DOGE_NAME:
        return None
    arguments = bind_arguments(MODEL_ARGUMENTS, args, options)
    _refuse_additive_padding(arguments.get("attention_mask"))
    if pieces is not None:
        arguments |= pieces.changed_arguments(arguments, model.config, DOGE_NAME)
        context = Context(None, Memo() if may_read() else None, arguments.pop(PIECES))
        return (), arguments | {CONTEXT: context}
    use_cache = arguments.get("use_cache")
    use_cache = model.config.use_cache if use_cache is None else use_cache
    cache = find_cache(arguments)
    if cache is not None:
        check_cache(cache)
    # Training reads no cache.
    elif use_cache and not torch.is_grad_enabled():
        cache = _default_cache(model)
        if cache is not None:
            arguments[CACHE] = cache
    kind, mask = None, None
    if cache is None and arguments.get("cache_position") is None and is_causal_config(model.config):
        kind, mask = mask_kind(arguments, bool(use_cache))
    if mask is not None:
        arguments["attention_mask"] = mask
    arguments[CONTEXT] = Context(kind, Memo() if may_read() else None)
    return (), arguments


def _refuse_additive_padding(padding: object) -> None:
    """Raises for a floating point mask [B, S] that may be additive: transformers takes every number but 0 for a token.

    If values cannot be read, an additive mask cannot be told from a mask of ones and zeros, so both are refused.
    """
    is_float = isinstance(padding, torch.Tensor) and padding.is_floating_point()
    if not is_float or padding.dim() > 3:
        return
    fault = "whose numbers compiled code cannot read"
    if may_read():
        if not (padding < 0).any():
            return
        fault = "with negative numbers"
    raise ValueError(
        f"attention_mask: got {padding.dtype} of shape {tuple(padding.shape)} {fault}, expected bool or integers, nonzero "
        "for tokens and 0 for padding; an additive mask has four dimensions, [B, 1, S, S]"
    )


def _default_cache(model: PreTrainedModel) -> DynamicMaskCache | None:
    """Returns the cache of `generate` and of calls without a cache, or None for transformers' own cache."""
    is_ours = getattr(model, _DEFAULT_CACHE, None) == _CACHE
    if not is_ours or implementation_of(model.config) != DOGE_NAME:
        return None
    return DynamicMaskCache(model.config)
