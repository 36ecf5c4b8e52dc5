"""Lets presses of NVIDIA's kvpress score keys. The scores decide which keys leave the cache.

kvpress itself cuts a cache after the prompt, or replaces keys in the cache by fake ones. Here attention uses intervals,
and a `DynamicMaskCache` holds only the keys that the rule keeps, so that keys that have left take no memory.

    from kvpress import DMSPress, KVzapPress

    add_press(model, DMSPress(KVzapPress(), threshold=-4.0, decoding=True), keep_window_size=4096)
    model.generate(..., past_key_values=DynamicMaskCache(model.config))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._shared.layer_call import swap_heads_and_tokens
from .transformers.learned_scores.add import add_learned_scores, scored_layers

# Classes of kvpress whose `score` needs no attention weights, no queries of the text, and no number of keys to keep.
WITHOUT_QUERIES = frozenset(
    {
        "CURPress", "ExpectedAttentionPress", "ExpectedAttentionStatsPress", "KVzapPress", "KeyDiffPress", "KnormPress",
        "LagKVPress", "LeverageScorePress", "QFilterPress", "RandomPress", "StreamingLLMPress",
    }
)  # fmt: skip


def add_press(
    model: nn.Module,
    press: object,
    keep_window_size: int | None = None,
    *,
    recent_window: int | None = None,
    sink_tokens: int = 0,
    dense_prefill: bool = True,
) -> nn.Module:
    """Lets a press of kvpress choose the keys that a model keeps. `remove_learned_scores` undoes it.

    Args:
        model: as in `add_learned_scores`.
        press: a `ScorerPress` whose scores need no queries, one of your own, or a `DMSPress` of such a press. Its
            compression_ratio is not used, since the number of keys is fixed. A `StreamingLLMPress` gives its n_sink
            keys alone: they are sinks, and count in keep_window_size.
        keep_window_size: how many keys are kept by their scores. With a DMSPress, it limits how many keys the threshold
            may keep. None sets no limit, and then no `DynamicMaskCache` is possible.
        recent_window: how many recent keys are kept whatever their scores. The default is the query's own key, or, for
            a DMSPress that continues after the prompt (`decoding=True`), its sliding window, t - j <=
            sliding_window_size.
        sink_tokens: how many of the first keys are always kept.
        dense_prefill: whether the first tokens of a cache attend to all of each other, as in kvpress. If a prompt comes
            in chunks (`prefill_chunk_size`), these are the tokens of the first chunk. False: attention follows the
            rule, in O(N w) time.

    A DMSPress with `decoding=True` scores a single token that comes after the prompt. Other presses keep such a token,
    as in kvpress, and any other DMSPress also keeps the last `sliding_window_size` tokens of the prompt. kvpress' cache
    then grows; here the worst key makes room once keep_window_size keys are kept. Several tokens that come together
    after the prompt are scored. So assisted decoding and prompt lookup, which verify several tokens at once, may write
    another text than greedy decoding.

    Returns:
        The same model.

    Raises:
        ValueError: a press that depends on queries, a DMSPress without a threshold, or arguments that make no rule.
        TypeError: no press.
    """
    threshold, scores_tokens, kept = None, False, 0
    if type(press).__name__ == "DMSPress":
        if press.threshold is None:
            raise ValueError("press: got a DMSPress without threshold, expected a number")
        threshold, scores_tokens = float(press.threshold), press.decoding
        if scores_tokens and recent_window is None:
            recent_window = press.sliding_window_size + 1
        elif recent_window is None:  # after the prompt no key leaves any more
            kept = press.sliding_window_size
        press = press.press
    _check_press(press)
    if _is_kvpress(press, "StreamingLLMPress"):  # its scores depend on the length of the prompt
        sinks, press = press.n_sink, _MostRecent()
        if keep_window_size is None or keep_window_size <= sinks:
            raise ValueError(
                f"keep_window_size: got {keep_window_size} with a StreamingLLMPress of {sinks} sinks, expected more than {sinks}"
            )
        sink_tokens, keep_window_size = max(sink_tokens, sinks), keep_window_size - sinks
    if hasattr(press, "post_init_from_model"):
        press.post_init_from_model(model)
    rotary = next((m.rotary_emb for m in model.modules() if hasattr(m, "rotary_emb")), None)
    add_learned_scores(
        model,
        keep_window_size,
        recent_window=1 if recent_window is None else recent_window,
        sink_tokens=sink_tokens,
        score_threshold=threshold,
        scorer=_score_without_layer,
        dense_prefill=dense_prefill,
    )
    for layer in scored_layers(model):
        layer.scorer.is_gate = False
        layer.scorer.function = _PressScorer(press, layer, rotary, scores_tokens, kept)
    return model


def _score_without_layer(hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Raises RuntimeError. It is the scorer of a layer until the layer exists, which _PressScorer needs."""
    raise RuntimeError("a press scores keys only once it has its layer")


class _PressScorer:
    """Computes the scores [B, S, Hkv] of a press for one layer.

    scores_tokens: whether a single token is scored; otherwise it is kept.
    kept: how many of the last tokens of a prompt are kept, too.
    """

    def __init__(
        self,
        press: object,
        layer: nn.Module,
        rotary: nn.Module | None,
        scores_tokens: bool,
        kept: int,
    ):
        self.press, self.layer, self.rotary = press, layer, rotary
        self.scores_tokens, self.kept = scores_tokens, kept

    @torch.no_grad()
    def __call__(self, hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if key.shape[1] == 1 and not self.scores_tokens:
            return key.new_full(key.shape[:3], float("inf"), dtype=torch.float32)
        # Presses read this attribute. It is not set as a module, because the layer's files would then include it.
        vars(self.layer)["rotary_emb"] = self.rotary
        try:
            states = swap_heads_and_tokens(key, value)
            scores = self.press.score(self.layer, hidden, *states, None, {"hidden_states": hidden})
        finally:
            del vars(self.layer)["rotary_emb"]
        scores = scores.transpose(1, 2).clone()
        scores[:, max(0, key.shape[1] - self.kept) :] = float("inf")
        return scores


class _MostRecent:
    """Gives all keys one score, so that the most recent ones are kept."""

    def score(self, module, hidden_states, keys: Tensor, *args) -> Tensor:
        return torch.zeros_like(keys[..., 0])


def _is_kvpress(press: object, name: str) -> bool:
    """Whether a press has a class of kvpress of this name, or a subclass that inherits its `score`."""
    owner = next(base for base in type(press).__mro__ if "score" in vars(base))
    return owner.__name__ == name and owner.__module__.startswith("kvpress.")


def _check_press(press: object) -> None:
    if not callable(getattr(press, "score", None)):
        raise TypeError(
            f"press: got {type(press).__name__}, expected a ScorerPress or a DMSPress of kvpress"
        )
    defining = [base for base in type(press).__mro__ if "score" in vars(base)]
    for owner in (type(press), *defining[:1]):  # a press of the user's may inherit its score
        if owner.__module__.startswith("kvpress.") and owner.__name__ not in WITHOUT_QUERIES:
            raise ValueError(
                f"press: got {type(press).__name__}, whose choice depends on queries, on other layers or on how many keys are kept; "
                f"expected one of {', '.join(sorted(WITHOUT_QUERIES))}, or a DMSPress of one"
            )
