"""Settings of a model and keywords of a call are followed."""

import pytest
import torch
from transformers import LlamaConfig

from doge_generation import left_padding
from flash_dmattn.integrations.transformers import key_interval_mask
from scored_models import make_base, make_config, make_ids

pytestmark = pytest.mark.transformers


@pytest.mark.parametrize(
    ("family", "options"),
    [("Mistral", {"sliding_window": None}), ("Mistral", {"sliding_window": 7}), ("GPT2", {})],
)
def test_models_without_scores_equal_eager(family, options):
    """attn_implementation="flash_dmattn" is exact attention for models that have no scores."""
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


def test_bias_of_a_call_is_added_and_its_window_is_refused():
    model = make_base(num_hidden_layers=1)
    model.set_attn_implementation("flash_dmattn")
    ids, bias = torch.arange(8)[None], torch.randn(1, 2, 8)
    with torch.no_grad():
        all_keys = model(ids, attention_bias=bias).logits
        assert not torch.equal(all_keys, model(ids).logits)
        with pytest.raises(TypeError, match="^keep_window_size: got an unknown keyword"):
            model(ids, attention_bias=bias, keep_window_size=3)


def test_type_that_was_not_compared_warns_and_runs():
    class Config(LlamaConfig):
        model_type = "llama_of_next_month"

    model, ids = make_base(), torch.arange(3, 9)[None]
    expected = model(ids).logits
    model.config.__class__ = Config
    with pytest.warns(UserWarning, match="'llama_of_next_month', which nobody has compared"):
        model.set_attn_implementation("flash_dmattn")
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_masks_ignore_keywords_of_transformers_bookkeeping():
    passing = {"allow_is_causal_skip": False, "local_size": 3, "dtype": torch.half, "config": None}
    assert key_interval_mask(1, 8, 8, **passing).shape == (1, 1, 0, 2)  # causality is all
    assert key_interval_mask(1, 8, 1, q_offset=7, **passing) is None
