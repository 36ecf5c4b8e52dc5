"""A build in the layout of Hugging Face's `kernels` works together with the installed package: `make test-kernels`."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flash_dmattn

FOLDER = os.environ.get("FLASH_DMATTN_TEST_KERNELS")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="FLASH_DMATTN_TEST_KERNELS names no layout (make test-kernels)"
)


@pytest.fixture
def module(monkeypatch):
    """Loads the build as kernels.get_local_kernel does, under the id in its metadata."""
    monkeypatch.delenv("FLASH_DMATTN_LIBRARY", raising=False)
    (variant,) = Path(FOLDER, "build").iterdir()
    name = json.loads((variant / "metadata.json").read_text())["id"]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Namespaces(TorchDispatchMode):
    """Records the namespaces of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.namespace)
        return function(*args, **(kwargs or {}))


def test_layout_and_installed_package_have_equal_results_of_their_own_operators(module):
    results = []
    for package in (module, flash_dmattn):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 64, 2, 32, requires_grad=True) for _ in range(3))
        bias = torch.randn(1, 2, 64, requires_grad=True)
        with Namespaces() as called:
            out = package.flash_dmattn_func(
                q, k, v, attn_bias=bias, is_causal=True, keep_window_size=8
            )
            out.square().sum().backward()
        assert called.names - {"aten"} == {package.__name__}
        results.append([out, q.grad, k.grad, v.grad, bias.grad])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_compiled_function_has_the_operators_of_the_layout(module):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    x = torch.randn(1, 32, 2, 16)
    torch.compile(module.flash_dmattn_func, backend=backend, fullgraph=True)(x, x, x)
    assert f"torch.ops.{module.__name__}.forward" in graphs[0]
