"""Decoders under context parallelism: each rank of a group has a piece of every sequence.

This module imports torch.distributed, which some builds of torch lack.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.doge.modeling_doge import DogeAttention

from ..._core.checks import check_tensor
from ...distributed._exchange.arguments import AttendOptions, ExchangeCall
from ...distributed.attention import attend_with_options, begin_call, bias_without_sinks
from ...distributed.batch import ContextParallel, offsets_of_documents
from ...distributed.boundary import boundary_state
from ...keys.rule import SelectionRule
from .._shared.layer_call import causal_mask
from .cache import DynamicMaskCache
from .cache_layer import DynamicMaskLayer
from .compat import CACHE, bind_arguments, find_cache, implementation_of
from .families import is_attention
from .learned_scores.layers import has_scores
from .model_state import PIECES


class PieceForward(NamedTuple):
    """The group of one forward, and the arguments of attention that all layers share."""

    group: ContextParallel
    key_mask: torch.Tensor | None
    cu_seqlens: torch.Tensor | None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: torch.Tensor,
        rule: SelectionRule,
        slots: DynamicMaskLayer | None,
        *,
        bias: str | torch.Tensor | None = "scores",
        **options,
    ) -> torch.Tensor:
        """Computes attention of a piece [B, n, H, D] over the whole sequences. Returns [B, n, Hq, D].

        The result of a query that sees no key is 0.

        slots: the layer of a cache that receives the keys that tokens after the piece see.
        bias: as attn_bias of context_parallel_dmattn. If it is a tensor, the bias of sinks is left out.
        options: the options of `attend_to_pieces`.
        """
        if slots is not None:
            try:
                slots.check_kernels(key, value)
            except Exception as error:
                self.group.collectives.raise_on_all_ranks("begin_exchange", error)
        options = AttendOptions(**options)
        call = ExchangeCall(
            key, value, scores, rule, bias, key_mask=self.key_mask, cu_seqlens=self.cu_seqlens
        )
        exchanged = begin_call(self.group.collectives, call, query, options)
        if slots is not None:
            state = boundary_state(exchanged, chunk=slots.chunk)
            slots.adopt_slots(state, exchanged.boundary.pieces.end())
        if isinstance(bias, torch.Tensor):
            exchanged = bias_without_sinks(exchanged)
        return attend_with_options(query, exchanged, options)


# Decoders in which only attention mixes tokens, by `config.model_type`.
_FAMILIES = ("doge", "llama", "mistral", "qwen2", "qwen3")


class ModelOfPieces:
    """The attribute that `enable_flash_dmattn(model, context_parallel=...)` gives each decoder and each model around it."""

    def __init__(self, models: list[PreTrainedModel], group):
        """Raises if a model's results on pieces would differ from those on the whole sequence.

        models: Doge models, or models that contain layers with scores.
        """
        decoders = []
        for model in models:
            family, name = model.config.model_type, type(model).__name__
            if family not in _FAMILIES:
                raise ValueError(
                    f"context_parallel: got a {name}, expected a decoder of {', '.join(_FAMILIES)}"
                )
            if not name.endswith(("Model", "ForCausalLM")):
                raise ValueError(
                    f"context_parallel: got a {name}, which reads one token of the whole sequence; expected a decoder or its "
                    "ForCausalLM"
                )
            if name.endswith("Model"):
                decoders.append(model)
        if not decoders:
            raise ValueError(
                "context_parallel: got attention layers without their decoder, which gives them positions; expected it, too"
            )
        for decoder in decoders:
            if "position_ids" not in inspect.signature(type(decoder).forward).parameters:
                raise ValueError(
                    f"context_parallel: got a {type(decoder).__name__} whose forward has no argument position_ids, expected the "
                    "arguments of transformers' decoders"
                )
            plain = {
                type(layer).__name__
                for layer in decoder.modules()
                if is_attention(layer)
                and not has_scores(layer)
                and not isinstance(layer, DogeAttention)
            }
            if plain:
                raise ValueError(
                    f"context_parallel: got layers {sorted(plain)} without scores, expected scores in all layers: others would "
                    "attend to their piece alone"
                )
        self.group = ContextParallel(group)

    def changed_arguments(
        self, arguments_by_name: Mapping[str, object], config: PretrainedConfig, name: str
    ) -> dict[str, object]:
        """Returns changed arguments of a decoder's forward. `PieceForward` gives layers padding and documents.

        name: the attention implementation that knows pieces. Raises under another one.
        """
        if implementation_of(config) != name:
            error = ValueError(
                f"attn_implementation: got {implementation_of(config)!r} with context parallelism (phase 'off', for one), "
                f"expected {name!r}: others attend to this rank's piece alone"
            )
            self.group.collectives.raise_on_all_ranks("forward", error)
        cache = find_cache(arguments_by_name)
        mask, positions = map(arguments_by_name.get, ("attention_mask", "position_ids"))

        def checked_tokens() -> torch.Tensor:
            tokens = arguments_by_name.get("input_ids")
            tokens = arguments_by_name.get("inputs_embeds") if tokens is None else tokens
            check_tensor(tokens, "input_ids")
            _check_piece(cache, mask, positions, *tokens.shape[:2])
            return tokens

        def compared_arguments(tokens: torch.Tensor) -> dict[str, object]:
            batch, length = tokens.shape[:2]
            presence = {"attention_mask": mask is not None, CACHE: cache is not None}
            return {"batch": batch, "tokens": length} | presence

        # Ranks with a mask do not gather positions, so a rank without a mask would wait for them.
        tokens = self.group.collectives.agreed_result("forward", checked_tokens, compared_arguments)
        batch, offsets = tokens.shape[0], None
        if mask is None:
            # The positions of a piece alone do not tell whether it begins inside a document.
            whole = self.group.gather(positions)
            offsets = offsets_of_documents(whole, batch, whole.shape[1])
        if offsets is not None and cache is not None:
            raise ValueError(
                "position_ids: got positions that begin again with a cache, expected one text in each row"
            )
        pieces = PieceForward(self.group, None if mask is None else mask.bool(), offsets)
        mask = causal_mask(batch, tokens.device)
        return {"attention_mask": mask, "use_cache": cache is not None, PIECES: pieces}


def _check_piece(cache: object, mask: object, positions: object, batch: int, length: int) -> None:
    is_new = isinstance(cache, DynamicMaskCache) and all(c.is_empty for c in cache.layers)
    if cache is not None and (torch.is_grad_enabled() or not is_new):
        raise ValueError(
            f"{CACHE}: got a {type(cache).__name__} with context parallelism, expected none, or an empty DynamicMaskCache "
            "without gradients, which then holds the keys that tokens after this rank's piece see"
        )
    if not isinstance(positions, torch.Tensor):
        raise ValueError(
            "position_ids: got None with context parallelism, expected those of this rank's piece in the whole sequence, as "
            "ContextParallel.shard cuts them: every rank would count from 0"
        )
    shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
    if mask is not None and (shape != (batch, length) or mask.is_floating_point()):
        raise ValueError(
            f"attention_mask: got {shape} with context parallelism, expected padding of this rank's piece, bool or integers "
            f"{(batch, length)}"
        )


def check_labels(model: PreTrainedModel, args: tuple, options: dict) -> None:
    """Checks labels before the forward of a ForCausalLM.

    Raises on every rank if labels would be shifted within a piece, or if counts of labels differ between ranks.
    """
    pieces = getattr(model, PIECES, None)
    if pieces is None:
        return
    names = inspect.signature(model.forward).parameters
    options = bind_arguments(names, args, options)
    labels, items = map(options.get, ("labels", "num_items_in_batch"))
    pieces.group.collectives.agreed_result(
        "forward with labels",
        lambda: _check_loss(model, options),
        lambda _: {
            "labels": labels is not None,
            "num_items_in_batch": None if items is None else float(items),
        },
    )


def _check_loss(model: PreTrainedModel, options: Mapping[str, object]) -> None:
    if options.get("labels") is not None:
        for name, reason in (
            ("shift_labels", "the label of a piece's last token is in the next piece"),
            ("num_items_in_batch", "a mean over each piece weighs labels unequally"),
        ):
            if options.get(name) is None:
                raise ValueError(
                    f"{name}: got None with labels and context parallelism, expected it: {reason}"
                )
    with_router = options.get("output_router_logits")
    if with_router is None:
        with_router = getattr(model.config, "output_router_logits", False)
    if with_router:
        raise ValueError(
            "output_router_logits: got True with context parallelism, expected False: its loss would count the tokens of one piece"
        )


class ContextParallelTrainerMixin:
    """Cuts each batch of a Trainer into pieces, for a model of `enable_flash_dmattn(model, context_parallel=...)`.

        class MyTrainer(ContextParallelTrainerMixin, Trainer):
            pass

    The data loader has to give the same batch to all ranks of the group. accelerate's loader does so under
    ParallelismConfig(cp_size=...). accelerate's own cutting, in head-tail order, is not used: this class overrides the
    method that calls it in transformers 4.57 to 5.24.
    """

    def _prepare_context_parallel_inputs(
        self, model: torch.nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable, dict[str, Any]]:
        pieces_of_modules = (getattr(module, PIECES, None) for module in model.modules())
        model_pieces = next((pieces for pieces in pieces_of_modules if pieces is not None), None)
        if model_pieces is None:
            return super()._prepare_context_parallel_inputs(model, inputs)
        known = {"input_ids", "labels", "position_ids", "attention_mask"}
        if unknown := inputs.keys() - known:
            raise ValueError(
                f"inputs: got {sorted(unknown)} in a batch, expected {sorted(known)}, which can be cut"
            )
        piece = model_pieces.group.shard(**inputs)
        pieces = {"input_ids": piece.input_ids, "position_ids": piece.position_ids}
        if piece.shift_labels is not None:
            pieces |= {"labels": piece.shift_labels, "shift_labels": piece.shift_labels}
        if piece.key_mask is not None:
            pieces["attention_mask"] = piece.key_mask
        return contextlib.nullcontext, pieces
