"""Configs of TorchTitan 0.3: Llama models whose queries keep the keys with the best learned scores, under context parallelism.

    PYTHONPATH=examples torchrun --nproc_per_node 8 -m torchtitan.train --module torchtitan_llama --config llama3_8b_dynamic_masks

Options of the command line work as for TorchTitan's own configs: --parallelism.context_parallel_degree 4, for one.
"""

from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel
from torchtitan.trainer import Trainer

from flash_dmattn.integrations.torchtitan import with_dynamic_masks


def llama3_8b_dynamic_masks() -> Trainer.Config:
    """Trains from scratch with 131,072 tokens on 8 GPUs, the longest sequence that the config's rotary embedding supports."""
    config = llama3_8b()
    config.model_spec = with_dynamic_masks(model_registry("8B"), keep_window_size=2048)
    config.parallelism = make_parallelism(8)
    config.training.seq_len = 131072
    config.activation_checkpoint = FullAC.Config()
    return config


def llama3_debugmodel_dynamic_masks() -> Trainer.Config:
    """Trains a small model on two GPUs."""
    config = llama3_debugmodel()
    config.model_spec = with_dynamic_masks(model_registry("debugmodel"), keep_window_size=256)
    config.parallelism = make_parallelism(2)
    return config


def make_parallelism(ranks: int) -> ParallelismConfig:
    """Returns the settings that split a sequence into consecutive pieces, without a load balancer."""
    return ParallelismConfig(
        context_parallel_degree=ranks,
        context_parallel_load_balancer=None,
        spmd_backend="partial_dtensor",
    )
