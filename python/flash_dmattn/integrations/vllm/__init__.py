"""A plugin of vLLM, which finds `register` by its entry point: Doge, and models with learned scores, whose sequences have
states of one size."""

from __future__ import annotations

import logging

SUPPORTED = ((0, 26), (0, 34))  # versions of vLLM: from the first on, to before the last
_MODELS = {
    "DogeForCausalLM": "doge:DogeForCausalLM",
    "ScoredLlamaForCausalLM": "scored_llama:ScoredLlamaForCausalLM",
}


def register() -> None:
    """Tells vLLM the models of this package, in each of its processes.

    Under a version that is not supported they are there and raise: vLLM itself would run a Doge without its scores.
    Other models are not touched.
    """
    import vllm
    from vllm import ModelRegistry

    for architecture, place in _MODELS.items():
        if not is_supported(vllm.__version__):
            place = f"refused:Refused{architecture}"
        ModelRegistry.register_model(architecture, f"{__name__}.{place}")
    if not is_supported(vllm.__version__):
        logging.getLogger("vllm").warning("%s", reason_against(vllm.__version__))
        return
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .settings import SlotModelConfig

    MODELS_CONFIG_MAP.update(dict.fromkeys(_MODELS, SlotModelConfig))


def is_supported(version: str) -> bool:
    """Whether a version of vLLM is in the range."""
    first, end = SUPPORTED
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return first <= numbers < end


def reason_against(version: str) -> str:
    first, end = (".".join(map(str, numbers)) for numbers in SUPPORTED)
    return (
        f"vllm: got version {version}, expected {first} or later and before {end}, for models of flash_dmattn "
        f"({', '.join(_MODELS)}): the interfaces of vLLM's states change between versions"
    )
