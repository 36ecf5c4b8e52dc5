"""The rules that modules of torch keep for the operators are there, whichever is imported first, and cost nobody else."""

import subprocess
import sys

import pytest
import torch.distributed as dist

COUNTER, SHARDED = "torch.utils.flop_counter", "torch.distributed.tensor"
COUNT = """
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(1, 8, 2, 16)
with FlopCounterMode(display=False) as counter:
    flash_dmattn.flash_dmattn_func(q, q, q)
assert counter.get_total_flops() == 4 * 8 * 2 * 8 * 16, counter.get_total_flops()
"""
SHARD = """
import os
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
q = distribute_tensor(torch.randn(2, 8, 2, 16), DeviceMesh("cpu", [0]), [Shard(0)])
assert flash_dmattn.flash_dmattn_func(q, q, q).placements == (Shard(0),)
os._exit(0)  # gloo's threads outlive the interpreter
"""


def run(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.parametrize("first", ["torch's modules", "the package"])
def test_rules_register_in_either_order_of_imports(first):
    modules, uses = [COUNTER], COUNT
    if dist.is_available():
        modules, uses = [*modules, SHARDED], uses + SHARD
    order = [*modules, "flash_dmattn"] if first == "torch's modules" else ["flash_dmattn", *modules]
    run(f"import torch, {', '.join(order)}\n{uses}")


def test_package_import_loads_neither_module_and_leaves_the_import_system():
    run(
        f"""
import sys, torch
before = [*sys.meta_path], [*sys.path_hooks]
import flash_dmattn
assert before == (sys.meta_path, sys.path_hooks)
assert not {{{COUNTER!r}, {SHARDED!r}}} & sys.modules.keys()
"""
    )


@pytest.mark.parametrize("first", ["torch's module", "the package"])
def test_rule_that_torch_refuses_is_a_warning(first):
    names = [COUNTER, "flash_dmattn"]
    if first == "the package":
        names.reverse()
    warned = run(
        f"""
import sys
sys.modules["flash_dmattn.flops"] = None  # its import raises
import torch, {", ".join(names)}
q = torch.randn(1, 4, 1, 8)
flash_dmattn.flash_dmattn_func(q, q, q)
"""
    )
    assert f"{COUNTER} is without the rules of flash_dmattn.flops" in warned
