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
def test_either_may_be_imported_first(first):
    modules, uses = [COUNTER], COUNT
    if dist.is_available():
        modules, uses = [*modules, SHARDED], uses + SHARD
    order = [*modules, "flash_dmattn"] if first == "torch's modules" else ["flash_dmattn", *modules]
    run(f"import torch, {', '.join(order)}\n{uses}")


def test_the_package_imports_neither():
    run(
        f"""
import sys, flash_dmattn
assert not {{{COUNTER!r}, {SHARDED!r}}} & sys.modules.keys()
"""
    )


def test_looking_for_the_module_does_not_use_up_the_rules():
    """Nor does the module keep another loader than its own."""
    run(
        f"""
import importlib.util, torch, flash_dmattn
spec = importlib.util.find_spec({COUNTER!r})
assert "flop_formula" in spec.loader.get_source({COUNTER!r})
import torch.utils.flop_counter as module
assert type(module.__loader__) is type(module.__spec__.loader) is type(torch.__loader__)
{COUNT}"""
    )


def test_the_finders_of_two_versions_of_the_package_take_turns():
    run(f"""
import sys, torch, flash_dmattn
from flash_dmattn._after_import import _Finder
sys.meta_path.insert(0, _Finder())
{COUNT}""")


@pytest.mark.parametrize("first", ["torch's module", "the package"])
def test_a_rule_that_torch_refuses_is_a_warning(first):
    names = [COUNTER, "flash_dmattn"]
    if first == "the package":
        names.reverse()
    warned = run(
        f"""
import sys
sys.modules["flash_dmattn.flops"] = None  # its import raises
import torch, {", ".join(names)}
assert {COUNTER!r} in sys.modules and flash_dmattn.flash_dmattn_func
"""
    )
    assert f"{COUNTER} is without the rules of flash_dmattn.flops" in warned
