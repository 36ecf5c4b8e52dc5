"""Runs a function in processes that gloo connects."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


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
        rest = function, f"{folder}/meeting", count, arguments
        # A fork has the modules of this process, whose import takes seconds. CUDA does not survive a fork.
        method = "forkserver" if torch.cuda.is_available() else "fork"
        mp.start_processes(_run, rest, nprocs=count, start_method=method)
