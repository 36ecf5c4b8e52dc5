"""Runs a function in processes that are joined by gloo."""

import os
import sys
import tempfile
from multiprocessing import set_forkserver_preload

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# All that tests import in several processes: once for all of them, instead of seconds in each.
PRELOADED = [
    "flash_dmattn",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.doge.modeling_doge",
    "flash_dmattn.integrations.transformers",
]


def _run(rank, function, file, count, arguments):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count)
    try:
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
    """function(rank, *arguments) in each of `count` processes; their errors are raised here."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked from a process that has imported them and done nothing else; what is not installed is left out.
        set_forkserver_preload(PRELOADED)
        rest = function, f"{folder}/meeting", count, arguments
        mp.start_processes(_run, rest, nprocs=count, start_method="forkserver")
