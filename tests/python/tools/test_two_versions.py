"""Loads two builds in the layout of Hugging Face's `kernels` in one process; each has its own namespace.

FLASH_DMATTN_TEST_KERNELS names their folders: `make test-kernels`.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

FOLDERS = os.environ.get("FLASH_DMATTN_TEST_KERNELS", "").split()
pytestmark = pytest.mark.skipif(
    len(FOLDERS) != 2, reason="FLASH_DMATTN_TEST_KERNELS names no two builds (make test-kernels)"
)


def load(folder: str):
    """Loads a build as kernels.get_local_kernel does, under the id in its metadata."""
    (variant,) = Path(folder, "build").iterdir()
    name = json.loads((variant / "metadata.json").read_text())["id"]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Namespaces(TorchDispatchMode):
    """Records the namespaces of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.namespace)
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def libraries_of_their_own(monkeypatch):
    monkeypatch.delenv("FLASH_DMATTN_LIBRARY", raising=False)


def test_two_versions_work_in_one_process():
    one, other = map(load, FOLDERS)
    assert one.__name__ != other.__name__
    assert one._core.ops.NAMESPACE == one.__name__
    assert other._core.ops.NAMESPACE == other.__name__
    results = []
    for module in (one, other):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 64, 2, 32, requires_grad=True) for _ in range(3))
        bias = torch.randn(1, 2, 64, requires_grad=True)
        with Namespaces() as called:
            out = module.flash_dmattn_func(
                q, k, v, attn_bias=bias, is_causal=True, keep_window_size=8
            )
            out.square().sum().backward()
        assert called.names - {"aten"} == {module.__name__}
        results.append([out, q.grad, k.grad, v.grad, bias.grad])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("folder", FOLDERS)
def test_compiled_function_takes_its_own_version(folder):
    module, graphs = load(folder), []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    x = torch.randn(1, 32, 2, 16)
    torch.compile(module.flash_dmattn_func, backend=backend, fullgraph=True)(x, x, x)
    assert f"torch.ops.{module.__name__}.forward" in graphs[0]
