"""Runs a function in processes that gloo connects."""

import os
import sys
import tempfile
from multiprocessing import set_forkserver_preload

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Modules that tests import in several processes. They are imported once for all, instead of for seconds in each.
PRELOADED = [
    "hypothesis",
    "pytest",
    "flash_dmattn",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.doge.modeling_doge",
    "flash_dmattn.integrations.transformers",
    "transformers.trainer",
]


def _run(rank, function, file, count, arguments):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count)
    try:
        dist.barrier()  # a rank that ends at once would close connections that others are making
        torch.manual_seed(0)
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()
    # FSDP2 and device meshes keep gloo's threads beyond their group. One that asks for the lock of
    # an interpreter in finalization aborts the process, so the interpreter is not finalized.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_in_processes(count, function, *arguments):
    """Calls function(rank, *arguments) in each of `count` processes, and raises their errors."""
    with tempfile.TemporaryDirectory() as folder:
        # Processes are forked from one that has only imported these modules, without those that are not installed.
        set_forkserver_preload(PRELOADED)
        rest = function, f"{folder}/meeting", count, arguments
        mp.start_processes(_run, rest, nprocs=count, start_method="forkserver")
