"""Checks and changes the settings of vLLM for models with slots."""

from __future__ import annotations

import json
from pathlib import Path

from vllm.config import VllmConfig
from vllm.model_executor.models.config import MambaModelConfig, VerifyAndUpdateConfig

from .._shared.config_rules import CONFIG_NAME, LearnedScores
from ..serving.states import states_of

OPERATOR = "flash_dmattn_extend"  # in torch.ops.vllm; compiled graphs are split at it
_LLAMAS = ("llama", "mistral")  # families whose layers equal vLLM's Llama layers
_SETTINGS = "learned_scores.json"  # a file of save_scores


class SlotModelConfig(MambaModelConfig):
    """Checks the settings. vLLM calls it before it makes a model of this package."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Raises ValueError for settings that slots do not support, or under which results would not be exact."""
        model, cache, parallel = (
            vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
        )  # fmt: skip
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "speculative_config: got a config, expected None: a key that a draft token hides would not return with the draft "
                "refused"
            )
        if cache.cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype: got {cache.cache_dtype!r}, expected 'auto': slots have the dtype of the model"
            )
        if cache.enable_prefix_caching and cache.mamba_cache_mode != "align":
            if cache.mamba_cache_mode != "none":
                raise ValueError(
                    f"mamba_cache_mode: got {cache.mamba_cache_mode!r}, expected 'align': a state is kept between steps alone"
                )
            cache.mamba_cache_mode = "align"
        scheduler = vllm_config.scheduler_config
        if cache.enable_prefix_caching and scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = f"{__package__}.prefixes.make_scheduler"
        for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
            if getattr(parallel, name) > 1:
                raise ValueError(f"{name}: got {getattr(parallel, name)}, expected 1")
        if vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None:
            raise ValueError(
                "kv_transfer_config: got one (or kv_offloading_size), expected None: connectors move pages of keys"
            )
        if model.enable_sleep_mode:
            raise ValueError(
                "enable_sleep_mode: got True, expected False: states that wake up are not empty"
            )
        states_of(model.hf_text_config, model.dtype, parallel.tensor_parallel_size)  # raises
        super().verify_and_update_config(vllm_config)
        compilation, operator = vllm_config.compilation_config, f"vllm::{OPERATOR}"
        if compilation.splitting_ops is None:
            compilation.splitting_ops = [*compilation._attention_ops, operator]
        elif compilation.splitting_ops and operator not in compilation.splitting_ops:
            compilation.splitting_ops = [*compilation.splitting_ops, operator]


class ScoredLlamaConfig(SlotModelConfig):
    """Checks the settings of a ScoredLlamaForCausalLM."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Raises ValueError as the base class does, and for other families or scorers that vLLM cannot run."""
        model = vllm_config.model_config
        config = model.hf_text_config
        stored = scores_beside_model(model.model)
        if stored is not None:
            setattr(config, CONFIG_NAME, stored)
        if config.model_type not in _LLAMAS:
            # Another family may use the same parameter names in layers with multipliers, another rotation or none.
            raise ValueError(
                f"config.model_type: got {config.model_type!r} for ScoredLlamaForCausalLM, expected one of {_LLAMAS}"
            )
        scores, parts = (
            LearnedScores.from_config(config), vllm_config.parallel_config.tensor_parallel_size
        )  # fmt: skip
        if scores is not None and scores.scorer == "custom":
            raise ValueError(
                f"config.{CONFIG_NAME}: got a scorer of your own, whose code no checkpoint holds; expected 'hidden', 'mlp', "
                "'value', 'key_norm' or 'random'"
            )
        if scores is not None and scores.scorer == "value" and parts > 1:
            raise ValueError(
                f"config.{CONFIG_NAME}: got the scorer 'value', which reads the values of all heads, in {parts} parts (tensor "
                "parallelism), expected 'hidden', 'mlp', 'key_norm' or 'random', or one part"
            )
        super().verify_and_update_config(vllm_config)


class StockModelConfig(VerifyAndUpdateConfig):
    """Refuses a Doge or learned scores in vLLM's own models, which would attend to all keys."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        config, got = model.hf_text_config, f"architectures: got {model.architecture!r}"
        if config.model_type == "doge":
            raise ValueError(
                f"{got} for a Doge, whose masks and scores it leaves out; expected 'DogeForCausalLM' without --model-impl"
            )
        configs = (model.hf_config, config)
        has_scores = any(getattr(c, CONFIG_NAME, None) is not None for c in configs)
        if has_scores or scores_beside_model(model.model) is not None:
            way_out = "'ScoredLlamaForCausalLM' (--hf-overrides '{\"architectures\": [\"ScoredLlamaForCausalLM\"]}')"
            if config.model_type not in _LLAMAS:
                way_out = (
                    f"a model_type of {_LLAMAS}; transformers' generate runs {config.model_type!r}, and without "
                    f"config.{CONFIG_NAME} and {_SETTINGS} vLLM attends to all keys"
                )
            raise ValueError(
                f"{got} for a model with learned scores, which it leaves out; expected {way_out}"
            )
        super().verify_and_update_config(vllm_config)

    @classmethod
    def checked_config(cls, config: type[VerifyAndUpdateConfig]) -> type[VerifyAndUpdateConfig]:
        """Returns a class that checks as this class does, and then does what `config` does."""
        return config if issubclass(config, cls) else type(config.__name__, (cls, config), {})


def scores_beside_model(folder: str) -> dict | None:
    """Returns the settings that `save_scores` has written into the model's folder, or None."""
    path = Path(folder, _SETTINGS)
    return json.loads(path.read_text()) if path.is_file() else None
