"""Runs TorchTitan's own test of FlexAttention under context parallelism, with our exchange between its ranks (`make test-peers`).

FlexAttention computes the whole sequence. Our processes are those of gloo on a CPU, where theirs are NCCL's.
"""

import os
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchtitan", reason="TorchTitan has an environment of its own")

from processes import run_in_processes  # noqa: E402

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MODELS = {"dense": ("Qwen2", SIZES), "moe": ("Qwen3Moe", SIZES)}


def exchange_keys_in_order(model, mesh):
    """Takes the place of a function that gathers all keys and values on each rank."""
    from flash_dmattn.distributed import context_parallel_dmattn

    def attend(query, key, value, *, module, block_mask, scaling=None, **options):
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        scores = key.new_zeros(1, 1, key.shape[1]).expand(key.shape[0], -1, -1)
        every = key.shape[1] * mesh.size()
        return context_parallel_dmattn(
            query, key, value, scores, attn_bias=None, keep_window_size=every, scale=scaling, group=mesh,
        )  # fmt: skip

    kernels = [m._titan_flex_kernel for m in model.modules() if hasattr(m, "_titan_flex_kernel")]
    assert kernels
    for kernel in kernels:
        kernel.forward = attend


def run_their_test(rank, folder, arguments):
    from torchtitan.distributed import parallel_dims
    from torchtitan.experiments.transformers_modeling_backend import parallelize
    from torchtitan.experiments.transformers_modeling_backend.tests import (
        test_flex_cp_numerical as theirs,
    )

    parallel_dims.device_type = "cpu"
    with (
        mock.patch.dict(os.environ, WORLD_SIZE="2"),
        mock.patch.object(sys, "argv", ["test", "--hf_model", folder, *arguments]),
        mock.patch.object(theirs.utils, "get_local_device", lambda: torch.device("cpu")),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(dist, "init_process_group"),  # processes.py makes and ends the group
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(parallelize, "_wrap_flex_kernel_cp", exchange_keys_in_order),
        mock.patch.object(parallelize, "apply_fsdp"),  # for their parameters it needs torch 2.14
    ):
        theirs.main()


@pytest.mark.parametrize("arguments", [(), ("--bs", "2"), ("--moe",)], ids=" ".join)
def test_flex_cp_numerical(arguments, tmp_path):
    import transformers

    name, sizes = MODELS["moe" if "--moe" in arguments else "dense"]
    config = getattr(transformers, f"{name}Config")(architectures=[f"{name}ForCausalLM"], **sizes)
    config.save_pretrained(tmp_path)
    run_in_processes(2, run_their_test, str(tmp_path), arguments)
