"""Compares a DynamicMaskCache whose config has a rule with attention over all tokens."""

import copy

import pytest
import torch
from transformers import LlamaConfig

from flash_dmattn import flash_dmattn_func, select_key_intervals
from flash_dmattn._core.numerics import Numerics
from flash_dmattn.integrations._shared.token_order import ScoredTokens
from flash_dmattn.integrations.transformers import DynamicMaskCache
from token_streams import RULES, Stream

# Every rule is tested with a window for all heads or one per head.
rules = pytest.mark.parametrize(
    ("rule", "window"), list(zip(RULES, [6, (5, 2)] * 3, strict=True)), ids=str
)


def texts_alone(stream):
    """Returns the results of a stream's rows, each without its padding, by the columns of the tokens."""
    out = torch.full_like(stream.q, torch.nan)
    for row, mask in enumerate(stream.mask):
        q, k, v = (t[None, row, mask] for t in (stream.q, stream.k, stream.v))
        scores = stream.scores[None, row, :, mask]
        chosen = select_key_intervals(scores, **stream.rule)
        out[row, mask] = flash_dmattn_func(
            q, k, v, attn_bias=scores, key_intervals=chosen, scale=8**-0.5, backend="reference"
        )[0]
    return out


def check(stream, out, begin, end):
    is_token = stream.mask[:, begin:end]
    expected = texts_alone(stream)[:, begin:end]
    stream.assert_close(out[is_token], expected[is_token])


def config_of(stream):
    parts = {name: value for name, value in stream.rule.items() if value is not None}
    return LlamaConfig(num_hidden_layers=2, **parts)


def fill(layer, stream, end):
    layer.fill(ScoredTokens(*stream.tokens(0, end), stream.mask[:, :end]))


def attend(layer, stream, begin, end, change=lambda t: t):
    q, (k, v, scores) = stream.q[:, begin:end], stream.tokens(begin, end)
    tokens = ScoredTokens(change(k), change(v), scores, stream.mask[:, begin:end])
    return layer.attend(change(q), tokens, Numerics(8**-0.5, 0.0, True, False))[0]


@pytest.mark.parametrize("static", [False, True])
@rules
def test_chunks_and_steps_of_padded_rows_equal_texts_alone(rule, window, static):
    stream = Stream(60, window, kind="ties", padding="anywhere", rule=rule)
    cache = DynamicMaskCache(config_of(stream), static=static, chunk=7)
    for layer in cache.layers:
        fill(layer, stream, 13)
        begin = 13
        for size in (1, 1, 9, 1, 20, 1, 1, 7, 6):
            check(stream, attend(layer, stream, begin, begin + size), begin, begin + size)
            begin += size
        assert int(layer.get_seq_length()) == begin == stream.length
        places = sum(layer.rule.places_of_heads(2))  # the memory is their sum
        assert layer.keys.shape[1:-1].numel() == places + 2 * layer.slots.chunk
        assert layer.rule.place_count() == layer.slots.places


@pytest.mark.parametrize("prompt", [9, 200])  # more than can be dropped
@rules
def test_dropped_tokens_leave_no_trace(rule, window, prompt):
    stream = Stream(prompt + 180, window, kind="ties", padding="anywhere", rule=rule)
    layer = DynamicMaskCache(config_of(stream)).layers[0]
    layer.activate_past_recording()
    fill(layer, stream, prompt)
    begin = prompt
    for size, dropped in ((1, 3), (5, 1), (60, 0), (90, 20), (4, 2), (1, 1)):
        check(stream, attend(layer, stream, begin, begin + size), begin, begin + size)
        begin += size
        if dropped and begin + dropped <= stream.length:
            attend(layer, stream, begin, begin + dropped, change=lambda t: t + 5)
            layer.crop(-dropped)
            assert int(layer.get_seq_length()) == begin
    check(stream, attend(layer, stream, begin, begin + 1), begin, begin + 1)


def test_rows_and_resets_keep_the_rule():
    stream = Stream(40, (5, 2), kind="ties", rule=RULES[4])
    cache = DynamicMaskCache(config_of(stream))
    layer = cache.layers[0]
    for one in cache.layers:
        fill(one, stream, 20)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    again = copy.deepcopy(layer)
    for one in (layer, again):
        check(stream, attend(one, stream, 20, 25), 20, 25)
    cache.reset()
    fill(layer, stream, 11)
    check(stream, attend(layer, stream, 11, 40), 11, 40)


def test_saved_config_has_the_rule(tmp_path):
    rule = {
        "keep_window_size": [5, 2],
        "recent_window": 3,
        "recent_competes": True,
        "sink_tokens": 1,
    }
    LlamaConfig(num_hidden_layers=2, **rule).save_pretrained(tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    layer_rule = DynamicMaskCache(config).layers[1].rule
    assert layer_rule.non_default_parts() == rule | {"keep_window_size": (5, 2)}
