"""The definition of attention with learned scores, by the oracle, as an implementation of transformers' attention interface."""

import contextlib

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from dense_in_double import dense_in_double
from flash_dmattn.integrations.transformers.learned_scores.add import scored_layers
from rules_by_definition import visible_keys

NAME = "scores_by_definition"
_hidden = {}  # hidden states by running layer


@contextlib.contextmanager
def by_definition(model):
    """Makes the layers of a model attend by definition within this context. Only rows that are not padding can be compared."""
    layers = scored_layers(model)
    hooks = [layer.register_forward_pre_hook(_remember, with_kwargs=True) for layer in layers]
    names = [layer.config._attn_implementation for layer in layers]
    for layer in layers:
        layer.config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        for layer, hook, name in zip(layers, hooks, names, strict=True):
            hook.remove()
            layer.config._attn_implementation_internal = name
        _hidden.clear()


def _remember(layer, args, kwargs):
    _hidden[layer] = args[0] if args else kwargs["hidden_states"]


def _attend(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    *,
    scaling=None,
    softcap=None,
    s_aux=None,
    **kwargs,
):
    if attention_mask.is_floating_point():
        attention_mask = attention_mask == 0
    states = [t.transpose(1, 2) for t in (query, key, value)]
    visible, bias = attention_mask, None
    if module in _hidden:
        scores = module.scorer(_hidden[module], *states[1:])
        bias, seen = _bias_and_keys(module, scores, attention_mask)
        visible = visible & seen
    options = {"softcap": softcap or 0.0, "scale": scaling, "sinks": s_aux}
    out = dense_in_double(*states, bias, visible, **options)[0].to(query.dtype)
    return out.contiguous(), None  # some layers call view() on it


def _bias_and_keys(layer, scores, mask):
    """Returns bias and visible keys, [B, Hkv, S, S], of texts under a mask of causality, padding and packing."""
    rule, length = layer.scoring.rule, scores.shape[2]
    positions = torch.arange(length)
    old = positions[:, None] - positions >= rule.recent_window
    # A rule with no other keys shows only the sinks.
    alone = rule._replace(keep_window_size=0, recent_window=0, score_threshold=None)
    sinks = _keys_of_rule(alone, scores, mask)
    if layer.scoring.phase == "hard":
        bias = (scores - scores.detach())[:, :, None]
        return torch.where(old & ~sinks, bias, 0.0), _keys_of_rule(rule, scores, mask)
    bias = (scores - layer.scorer.first_score)[:, :, None]
    return torch.where(old & ~sinks, bias, 0.0), torch.ones_like(sinks)


def _keys_of_rule(rule, scores, mask):
    """Returns which keys the rule shows, bool [B, Hkv, S, S]."""
    batch, heads, length = scores.shape
    positions = torch.arange(length)
    windows = rule.keep_window_size
    windows = windows if isinstance(windows, tuple) else (windows,) * heads
    seen = []
    for row in range(batch):
        allowed = mask[min(row, len(mask) - 1), 0]
        present = allowed.any(0)
        # No query sees a key of another document.
        documents = (
            torch.where(present, (allowed * positions[:, None]).amax(0), -1).cummax(0).values
        )
        seen += [
            visible_keys(
                scores[row, head].detach(), rule._replace(keep_window_size=window), is_causal=True,
                query_positions=positions, query_documents=documents, key_positions=positions,
                key_documents=documents, present=present, last_position=None,
            )
            for head, window in enumerate(windows)
        ]  # fmt: skip
    return torch.stack(seen).view(batch, heads, length, length)


def _mask(*args, **kwargs):
    """Returns a mask, bool [B, 1, S, S], never None."""
    kwargs = kwargs | {"allow_is_causal_skip": False}
    return masking_utils.sdpa_mask(*args, **kwargs)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
