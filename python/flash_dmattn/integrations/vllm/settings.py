"""The settings of vLLM under which models with slots run."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.models.config import MambaModelConfig

from ..serving.states import states_of

OPERATOR = "flash_dmattn_extend"  # of torch.ops.vllm, at which compiled graphs are split


class SlotModelConfig(MambaModelConfig):
    """vLLM asks it before it makes a model of this package."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Raises ValueError for settings under which results would not be exact or which no slots have."""
        model, cache, parallel = (
            vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
        )  # fmt: skip
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "speculative_config: got one, expected None: a key that a draft token hides would not return with the draft "
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
        if parallel.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size: got {parallel.pipeline_parallel_size}, expected 1"
            )
        states_of(model.hf_text_config, model.dtype, parallel.tensor_parallel_size)  # raises
        super().verify_and_update_config(vllm_config)
        compilation = vllm_config.compilation_config
        if compilation.splitting_ops is None:
            compilation.splitting_ops = [*compilation._attention_ops, f"vllm::{OPERATOR}"]
