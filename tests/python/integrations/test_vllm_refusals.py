"""The plugin for vLLM refuses some settings and models, with the reason. `make test-vllm` runs these tests."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from vllm_engine import plugin, served  # isort: skip: the first, as it skips without vLLM
import vllm
from transformers import LlamaConfig, LlamaForCausalLM

from doge_generation import make_model
from flash_dmattn.integrations.transformers import add_learned_scores, save_scores
from flash_dmattn.integrations.vllm.settings import ScoredLlamaConfig, SlotModelConfig
from scored_models import make_base, make_scored


@pytest.mark.parametrize(
    "config, options, message",
    [
        ({"sliding_window": 16}, {}, "config.sliding_window: got 16"),
        ({"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}, {}, "config.is_moe: got True"),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype: got 'fp8'"),
        ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                                     "prompt_lookup_max": 2}}, "speculative_config: got a config"),
    ],
)  # fmt: skip
def test_settings_without_exact_results_raise(tmp_path, config, options, message):
    make_model(**config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message), served(tmp_path, **options):
        pass


def settings_of(config, *, parts=1, **changes):
    """Returns the vLLM settings that SlotModelConfig reads for a model of `config`. changes: settings to change, by name."""
    settings = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=config, dtype=torch.float32, enable_sleep_mode=False, max_model_len=128,
            architecture="", model="",
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", enable_prefix_caching=False, mamba_cache_mode="none",
            mamba_block_size=None, kv_offloading_size=None,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, tensor_parallel_size=parts
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        compilation_config=SimpleNamespace(splitting_ops=None, _attention_ops=["vllm::attention"]),
        speculative_config=None,
        kv_transfer_config=None,
    )  # fmt: skip
    for name, value in changes.items():
        part = next((p for p in vars(settings).values() if hasattr(p, name)), settings)
        setattr(part, name, value)
    return settings


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv_transfer_config": object()}, "kv_transfer_config: got one"),
        ({"kv_offloading_size": 1.0}, "kv_transfer_config: got one"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size: got 2, expected 1"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode: got True, expected False"),
    ],
)
def test_settings_without_states_raise(changes, message):
    config = make_model().config
    SlotModelConfig.verify_and_update_config(settings_of(config))
    with pytest.raises(ValueError, match=f"^{message}"):
        SlotModelConfig.verify_and_update_config(settings_of(config, **changes))


@pytest.mark.parametrize(
    "splitting_ops, expected",
    [
        (None, ["vllm::attention", "vllm::flash_dmattn_extend"]),
        ([], []),
        (["vllm::mine"], ["vllm::mine", "vllm::flash_dmattn_extend"]),
        (["vllm::flash_dmattn_extend"], ["vllm::flash_dmattn_extend"]),
    ],
)
def test_piecewise_graphs_split_at_dmattn_operator(splitting_ops, expected):
    settings = settings_of(make_model().config, splitting_ops=splitting_ops)
    SlotModelConfig.verify_and_update_config(settings)
    assert settings.compilation_config.splitting_ops == expected


@pytest.mark.parametrize(
    "family, scorer, parts, message",
    [
        ("SmolLM3", "hidden", 1, "config.model_type: got 'smollm3'"),
        ("Granite", "hidden", 1, "config.model_type: got 'granite'"),
        ("Qwen2", "hidden", 1, "config.model_type: got 'qwen2'"),
        ("Llama", lambda hidden, key, value: hidden[..., :2], 1, "config.learned_scores: got a scorer of your own"),
        ("Llama", "value", 2, "config.learned_scores: got the scorer 'value'.* in 2 parts"),
    ],
)  # fmt: skip
def test_scored_models_that_llama_cannot_run_raise(family, scorer, parts, message):
    config = add_learned_scores(make_base(family), 4, scorer=scorer).config
    with pytest.raises(ValueError, match=f"^{message}"):
        ScoredLlamaConfig.verify_and_update_config(settings_of(config, parts=parts))


@pytest.mark.parametrize(
    "options, architecture",
    [
        ({"model_impl": "transformers"}, "TransformersMoEForCausalLM"),
        ({"hf_overrides": {"architectures": ["DogeModel"]}}, "DogeModel"),
        ({"hf_overrides": {"architectures": ["DogeForSequenceClassification"]}}, "DogeForSequenceClassification"),
    ],
)  # fmt: skip
def test_doge_without_its_scores_raises(tmp_path, options, architecture):
    make_model().save_pretrained(tmp_path)
    message = f"architectures: got '{architecture}' for a Doge"
    with pytest.raises(ValueError, match=message), served(tmp_path, **options):
        pass


@pytest.mark.parametrize(
    "family, saved_beside, architecture, way_out",
    [
        ("Llama", False, "LlamaForCausalLM", "--hf-overrides"),
        ("Llama", True, "LlamaForCausalLM", "--hf-overrides"),
        ("Qwen2", False, "Qwen2ForCausalLM", "transformers' generate runs 'qwen2'"),
        ("Qwen2", True, "Qwen2ForCausalLM", "transformers' generate runs 'qwen2'"),
        ("GptOss", False, "GptOssForCausalLM", "transformers' generate runs 'gpt_oss'"),  # has settings of vLLM's
    ],
)  # fmt: skip
def test_learned_scores_in_models_of_vllm_raise(
    tmp_path, family, saved_beside, architecture, way_out
):
    model = make_scored(family, scorer="key_norm")  # the scorer has no parameters
    (make_base(family) if saved_beside else model).save_pretrained(tmp_path)
    if saved_beside:
        save_scores(model, tmp_path)
    message = f"architectures: got '{architecture}' for a model with learned scores.*{way_out}"
    with pytest.raises(ValueError, match=message), served(tmp_path):
        pass


def test_missing_scores_raise(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    overrides = {"architectures": ["ScoredLlamaForCausalLM"]}
    with (
        pytest.raises(ValueError, match="config: got LlamaConfig without keep_window_size"),
        served(tmp_path, hf_overrides=overrides),
    ):
        pass


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0", "1.0.0"])
def test_other_versions_are_refused_with_the_reason(monkeypatch, version):
    registered = {}
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(vllm.ModelRegistry, "register_model", registered.__setitem__)
    plugin.register()
    for architecture in ("DogeForCausalLM", "ScoredLlamaForCausalLM", "DogeModel"):
        with pytest.raises(ValueError, match=f"got version {version}, expected 0.26 or later"):
            make_registered(registered[architecture])


def test_vllm_without_what_models_need_refuses_them_with_the_reason(monkeypatch):
    registered = {}
    monkeypatch.setattr(vllm.ModelRegistry, "register_model", registered.__setitem__)
    monkeypatch.delattr("vllm.model_executor.models.config.MODELS_CONFIG_MAP")
    plugin.register()
    with pytest.raises(ValueError, match="cannot have the models .*MODELS_CONFIG_MAP"):
        make_registered(registered["DogeForCausalLM"])


def make_registered(place):
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)(vllm_config=None)
