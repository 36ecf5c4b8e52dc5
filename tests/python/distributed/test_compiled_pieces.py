"""Compiled attention over pieces of a sequence equals uncompiled attention."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flash_dmattn.distributed import attend_to_pieces, begin_exchange, context_parallel_dmattn
from processes import run_in_processes
from sharded_cases import whole_and_piece


def compiled(rank, backend):
    q, k, v, do, s, rows = whole_and_piece(rank, 2)
    # The group's first calls come from compiled code.
    group, mesh = dist.new_group(), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    def in_two_steps(q, k, v, s):
        options = {"keep_window_size": 17, "recent_window": 5}
        exchanged = begin_exchange(k * 2, v, s, group=mesh, check=False, **options)
        return attend_to_pieces(q, exchanged)

    def in_documents(q, k, v, s):
        offsets = torch.tensor([0, 33, 70])
        options = {"group": group, "keep_window_size": 17, "cu_seqlens": offsets}
        return context_parallel_dmattn(q, k * 2, v, s, **options)

    # Compiling takes up to half a minute of a core. So only the rank that sees another rank's keys goes beyond the trace, and
    # inductor compiles no backward. Without gradients it removes everything that is not read.
    # Compiled code does not compare arguments.
    with_inductor = backend == "inductor"
    run_compiled = layer = in_two_steps if with_inductor else in_documents
    if rank or not with_inductor:
        run_compiled = torch.compile(layer, fullgraph=True, backend=backend if rank else "eager")
    results = []
    for run in (run_compiled, layer, run_compiled):
        leaves = [t[:, rows].clone().requires_grad_() for t in (q, k, v)]
        leaves.append(s[..., rows].clone().requires_grad_())
        is_again = len(results) == 2  # runs code that is already compiled
        with (
            torch._dynamo.config.patch(error_on_recompile=is_again),
            torch.set_grad_enabled(not with_inductor),
        ):
            out = run(*leaves)
        gradients = () if with_inductor else torch.autograd.grad(out, leaves, do[:, rows])
        results.append([out.detach(), *gradients])
        layer(*leaves)  # counts
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_equal_eager_ones(backend):
    run_in_processes(2, compiled, backend)
