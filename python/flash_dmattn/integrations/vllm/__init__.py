"""A plugin of vLLM for Doge and models with learned scores, whose sequences have states of one size.

vLLM finds `register` by its entry point.
"""

from __future__ import annotations

import logging

SUPPORTED = ((0, 26), (0, 33))  # vLLM versions: the first is included, the last is not
_MODELS = {
    "DogeForCausalLM": "doge:DogeForCausalLM",
    "ScoredLlamaForCausalLM": "scored_llama:ScoredLlamaForCausalLM",
}
_OTHER_DOGES = ("DogeModel", "DogeForSequenceClassification")
_reasons: list[str] = []  # why the models of this package cannot run in this process


def register() -> None:
    """Registers the models of this package with vLLM, in each of its processes.

    If this fails, or if the version is not supported, the registered models raise an error, because vLLM itself would
    run a Doge without its scores. Otherwise every other model raises an error if its folder has learned scores.
    """
    import vllm
    from vllm import ModelRegistry

    _reasons.clear()
    if not is_supported(vllm.__version__):
        _reasons.append(reason_against(vllm.__version__))
    else:
        try:
            _register_models(ModelRegistry)
        except Exception as error:  # of any type: other models still run
            _reasons.append(
                f"vllm: version {vllm.__version__} cannot have the models of flash_dmattn ({type(error).__name__}: {error})"
            )
    for architecture in (*_MODELS, *_OTHER_DOGES) if _reasons else _OTHER_DOGES:
        ModelRegistry.register_model(architecture, f"{__name__}.refused:RefusedModel")
    if _reasons:
        logging.getLogger("vllm").warning("%s", reason_to_refuse())


def _register_models(registry) -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .settings import ScoredLlamaConfig, SlotModelConfig, StockModelConfig

    for architecture in {*registry.get_supported_archs(), *MODELS_CONFIG_MAP, *_OTHER_DOGES}:
        own_settings = MODELS_CONFIG_MAP.get(architecture, StockModelConfig)
        MODELS_CONFIG_MAP[architecture] = StockModelConfig.checked_config(own_settings)
    MODELS_CONFIG_MAP["DogeForCausalLM"] = SlotModelConfig
    MODELS_CONFIG_MAP["ScoredLlamaForCausalLM"] = ScoredLlamaConfig
    for architecture, place in _MODELS.items():
        registry.register_model(architecture, f"{__name__}.{place}")


def reason_to_refuse() -> str:
    """Returns the message of RefusedModel."""
    return "; ".join(_reasons) or (
        f"architectures: got one of {_OTHER_DOGES}, which vLLM would run without masks and scores; expected 'DogeForCausalLM'"
    )


def is_supported(version: str) -> bool:
    """Whether a version of vLLM is in the supported range."""
    first, end = SUPPORTED
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return first <= numbers < end


def reason_against(version: str) -> str:
    first, end = (".".join(map(str, numbers)) for numbers in SUPPORTED)
    return (
        f"vllm: got version {version}, expected {first} or later and before {end}, for models of flash_dmattn "
        f"({', '.join(_MODELS)}): the interfaces of vLLM's states change between versions"
    )
