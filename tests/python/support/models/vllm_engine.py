"""An engine of vLLM in this process, over a small model. Skips where vLLM is not installed, or is of another version."""

import os
from contextlib import contextmanager

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine is in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
import vllm
from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory

from flash_dmattn.integrations import vllm as plugin

if not plugin.is_supported(vllm.__version__):
    pytest.skip(plugin.reason_against(vllm.__version__), allow_module_level=True)
plugin.register()


@contextmanager
def served(folder, **options):
    llm = LLM(
        model=str(folder),
        **{
            "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 128,
            "max_num_seqs": 8, "max_num_batched_tokens": 11, "num_gpu_blocks_override": 12, "seed": 0,
        } | options,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
