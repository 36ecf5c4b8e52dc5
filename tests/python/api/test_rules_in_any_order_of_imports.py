"""torch's modules get their rules for our operators whichever is imported first, and programs that use neither pay nothing."""

import torch.distributed as dist

from python_process import run_forked

COUNTER, SHARDED = "torch.utils.flop_counter", "torch.distributed.tensor"
MODULES = ", ".join([COUNTER, SHARDED] if dist.is_available() else [COUNTER])
USES = """
import torch
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(1, 8, 2, 16)
with FlopCounterMode(display=False) as counter:
    flash_dmattn.flash_dmattn_func(q, q, q)
assert counter.get_total_flops() == 4 * 8 * 2 * 8 * 16, counter.get_total_flops()
"""
if dist.is_available():
    USES += """
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
q = distribute_tensor(torch.randn(2, 8, 2, 16), DeviceMesh("cpu", [0]), [Shard(0)])
assert flash_dmattn.flash_dmattn_func(q, q, q).placements == (Shard(0),)
"""
IMPORT_ALONE = f"""
import sys
before = [*sys.meta_path], [*sys.path_hooks]
import flash_dmattn
assert before == (sys.meta_path, sys.path_hooks)
assert not {{{COUNTER!r}, {SHARDED!r}}} & sys.modules.keys()
import {MODULES}
"""
REFUSED = """
import sys, torch
sys.modules["flash_dmattn.flops"] = None  # its import raises
import {}
q = torch.randn(1, 4, 1, 8)
flash_dmattn.flash_dmattn_func(q, q, q)
"""


def test_rules_register_in_any_import_order_and_refused_rules_warn():
    """Importing only the package imports neither of torch's modules and does not change the import system."""
    run_forked(f"import {MODULES}, flash_dmattn\n{USES}")
    run_forked(f"{IMPORT_ALONE}\n{USES}")
    for order in (f"{COUNTER}, flash_dmattn", f"flash_dmattn, {COUNTER}"):
        output = run_forked(REFUSED.format(order)).stderr
        assert output.count(f"{COUNTER} is without the rules of flash_dmattn.flops") == 1
