"""Pieces of a sequence on two GPUs, with NCCL between processes, have the keys, bits and gradients of the whole on one GPU."""

from pathlib import Path

import pytest
import torch

import pieces_over_ranks
from pieces_over_ranks import CHECKS, GPU_CHECKS
from python_process import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than 2 GPUs"),
]


@pytest.mark.parametrize("check", [*CHECKS, *GPU_CHECKS])
def test_pieces_over_nccl_pass(check):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    run_python(*torchrun, Path(pieces_over_ranks.__file__), check, OMP_NUM_THREADS="2")
