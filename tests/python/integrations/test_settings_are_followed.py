"""Settings of a layer and keywords of a call are followed."""

import pytest
import torch

from dense_attention import HKV, HQ, KEEP, B, S, assert_same, attend, dense_attention, make_states
from flash_dmattn.integrations._shared.layer_call import BOOKKEEPING
from flash_dmattn.integrations.flash_dynamic_mask_attention import (
    flash_dynamic_mask_attention_forward,
)
from flash_dmattn.integrations.import_utils import is_flash_dmattn_available
from flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils import (
    fdma_peft_integration_check,
)


class Layer(torch.nn.Module):
    is_causal = True
    window_size = KEEP


def heads_first():
    return [t.transpose(1, 2) for t in make_states()]


def test_settings_come_from_the_module_or_the_call():
    states, bias = make_states(), torch.randn(B, HKV, S)
    heads_first = [t.transpose(1, 2) for t in states]
    layer = Layer()
    expected = attend(*states, None, bias, softmax_scale=0.3, softcap=5.0)
    for name in ("attention_bias", "position_bias"):
        out, weights = flash_dynamic_mask_attention_forward(
            layer, *heads_first, None, scaling=0.3, softcap=5.0, layer_idx=1, **{name: bias}
        )
        assert weights is None and torch.equal(out, expected)
    out, _ = flash_dynamic_mask_attention_forward(layer, *heads_first, None, bias, window_size=4)
    assert torch.equal(out, attend(*states, None, bias, keep_window_size=4))
    layer.is_causal = False
    out, _ = flash_dynamic_mask_attention_forward(layer, *heads_first, None, bias)
    assert torch.equal(out, attend(*states, None, bias, is_causal=False))


def test_mask_with_query_dimension_adds_no_causality():
    states = make_states()
    full = torch.ones(B, 1, S, S, dtype=torch.bool)
    out, _ = flash_dynamic_mask_attention_forward(
        Layer(), *(t.transpose(1, 2) for t in states), full
    )
    assert_same(states, out, dense_attention(*states, full, None))


def test_output_attentions_warns():
    with pytest.warns(UserWarning, match="output_attentions"):
        flash_dynamic_mask_attention_forward(Layer(), *heads_first(), None, output_attentions=True)


def test_availability_is_reported():
    assert is_flash_dmattn_available() is True


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("family", "options"),
    [("Mistral", {"sliding_window": None}), ("Mistral", {"sliding_window": 7}), ("GPT2", {})],
)
def test_named_implementation_equals_function(family, options):
    """attn_implementation="flash_dmattn" is exact attention for models that have no scores."""
    pytest.importorskip("transformers")
    from doge_generation import left_padding
    from scored_models import make_base, make_config, make_ids

    eager, config = make_base(family, **options), make_config(family, **options)
    ours = type(eager)._from_config(config, attn_implementation="flash_dmattn").eval()
    ours.load_state_dict(eager.state_dict())
    models, ids, padding = (eager, ours), make_ids(17), left_padding(2, 17, 5)
    torch.testing.assert_close(*(m(ids).logits for m in models), atol=1e-5, rtol=1e-5)
    logits = [m(ids, attention_mask=padding).logits[padding.bool()] for m in models]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    options = {"attention_mask": padding, "max_new_tokens": 9, "do_sample": False}
    written = [m.generate(ids, pad_token_id=0, **options) for m in models]
    assert torch.equal(*written)


@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (2, HQ, 2, 2), (2, 1, 5, 2)])
def test_integer_masks_over_two_keys_are_not_intervals(shape):
    query, key, value = heads_first()
    states = (query[:, :, : shape[2]], key[:, :, :2], value[:, :, :2])
    mask = torch.ones(shape, dtype=torch.int32)
    mask[..., 0, 1] = 0
    out, expected = (
        flash_dynamic_mask_attention_forward(Layer(), *states, m)[0] for m in (mask, mask.bool())
    )
    assert torch.equal(out, expected)


def test_intervals_of_two_queries_remain_intervals():
    states = [t[:, :, :2] for t in heads_first()]
    intervals = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32).expand(B, 1, 2, 2)
    out, _ = flash_dynamic_mask_attention_forward(Layer(), *states, intervals)
    expected, _ = flash_dynamic_mask_attention_forward(Layer(), *states, None)
    torch.testing.assert_close(out, expected)


def test_lengths_on_the_device_give_same_result():
    offsets = torch.arange(B + 1, dtype=torch.int32) * S
    packed = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), offsets)
    lengths = dict.fromkeys(("max_length_q", "max_length_k"), offsets.diff().max())
    states = make_states()
    expected = attend(*states, None, None, **packed)
    assert torch.equal(attend(*states, None, None, **packed, **lengths), expected)


def test_keywords_of_transformers_bookkeeping_are_ignored():
    states = heads_first()
    expected, _ = flash_dynamic_mask_attention_forward(Layer(), *states, None)
    bookkeeping = dict.fromkeys(BOOKKEEPING, True) | {"cache": None, "s_aux": None}
    actual, _ = flash_dynamic_mask_attention_forward(Layer(), *states, None, **bookkeeping)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("is_causal", [True, False])
def test_sliding_window_without_mask_is_applied(is_causal):
    states, window = make_states(), 5
    actual, _ = flash_dynamic_mask_attention_forward(
        Layer(),
        *(t.transpose(1, 2) for t in states),
        None,
        sliding_window=window,
        is_causal=is_causal,
    )
    distance = torch.arange(S)[:, None] - torch.arange(S)
    seen = distance.abs() < window
    mask = (seen & (distance >= 0) if is_causal else seen).expand(B, 1, S, S)
    assert_same(states, actual, dense_attention(*states, mask, None))


@pytest.mark.transformers
def test_bias_of_a_call_is_added_and_its_window_is_refused():
    pytest.importorskip("transformers")
    from scored_models import make_base

    model = make_base(num_hidden_layers=1)
    model.set_attn_implementation("flash_dmattn")
    ids, bias = torch.arange(8)[None], torch.randn(1, 2, 8)
    with torch.no_grad():
        all_keys = model(ids, attention_bias=bias).logits
        assert not torch.equal(all_keys, model(ids).logits)
        with pytest.raises(TypeError, match="^keep_window_size: got an unknown keyword"):
            model(ids, attention_bias=bias, keep_window_size=3)


@pytest.mark.transformers
def test_type_that_was_not_compared_warns_and_runs():
    transformers = pytest.importorskip("transformers")
    from scored_models import make_base

    class Config(transformers.LlamaConfig):
        model_type = "llama_of_next_month"

    model, ids = make_base(), torch.arange(3, 9)[None]
    expected = model(ids).logits
    model.config.__class__ = Config
    with pytest.warns(UserWarning, match="'llama_of_next_month', which nobody has compared"):
        model.set_attn_implementation("flash_dmattn")
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.transformers
def test_masks_ignore_keywords_of_transformers_bookkeeping():
    pytest.importorskip("transformers")
    from flash_dmattn.integrations.transformers import key_interval_mask

    passing = {"allow_is_causal_skip": False, "local_size": 3, "dtype": torch.half, "config": None}
    assert key_interval_mask(1, 8, 8, **passing).shape == (1, 1, 0, 2)  # causality is all
    assert key_interval_mask(1, 8, 1, q_offset=7, **passing) is None


def test_values_may_have_a_smaller_head_dimension():
    query, key, value = heads_first()
    out, _ = flash_dynamic_mask_attention_forward(Layer(), query, key, value[..., :5], None)
    expected, _ = flash_dynamic_mask_attention_forward(Layer(), query, key, value, None)
    assert torch.equal(out, expected[..., :5])


def test_peft_check_casts_to_target_dtype():
    tensors = [torch.randn(3) for _ in range(4)]
    assert all(
        t.dtype == torch.bfloat16 for t in fdma_peft_integration_check(*tensors, torch.bfloat16)
    )
    assert fdma_peft_integration_check(*tensors, None) == tuple(tensors)
    query, key, value, bias = fdma_peft_integration_check(
        tensors[0], tensors[1].half(), tensors[2], None, torch.bfloat16
    )
    assert (query.dtype, key.dtype, value.dtype) == (torch.bfloat16, torch.half, torch.bfloat16)
    assert bias is None
    assert fdma_peft_integration_check(None, None, None, None, torch.half) == (None,) * 4


def test_float32_inputs_are_cast_to_layer_dtype():
    """Float32 inputs of a layer with bfloat16 weights are attended to in bfloat16."""
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.bfloat16))
    states = [t.transpose(1, 2) for t in make_states()]
    for bias in (None, torch.randn(B, HKV, S)):
        window = None if bias is None else KEEP
        out, _ = flash_dynamic_mask_attention_forward(
            layer, *states, None, bias, window_size=window
        )
        assert out.dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = flash_dynamic_mask_attention_forward(layer.float(), *states, None, bias)
        assert out.dtype == torch.bfloat16
        layer.bfloat16()
    out, _ = flash_dynamic_mask_attention_forward(layer.float(), *states, None, None)
    assert out.dtype == torch.float32
