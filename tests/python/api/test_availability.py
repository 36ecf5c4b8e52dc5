"""The package reports which backends are available, with and without CUDA in the build and a GPU in the machine."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

import flash_dmattn
from flash_dmattn import functional
from flash_dmattn._core import availability
from python_process import run_forked

CUDA = next(backend for backend in flash_dmattn.backends() if backend.name == "cuda")


def test_availability_constants_equal_the_list():
    available = flash_dmattn.get_available_backends()
    assert available[-1] == "reference" and "cpu" in available
    for name in ("cpu", "cuda", "triton", "flex"):
        assert getattr(flash_dmattn, f"{name.upper()}_AVAILABLE") == (name in available)
    with pytest.raises(AttributeError, match="TPU_AVAILABLE"):
        _ = flash_dmattn.TPU_AVAILABLE


@pytest.mark.parametrize(
    "module, hip, words",
    [
        ("raise OSError('libcuda.so.1: wrong ELF class')", None, "OSError: libcuda.so.1: wrong ELF class"),
        ("", None, "AttributeError"),  # a folder of that name, say
        ("__version__ = '3.2.0'", None, "triton 3.2.0 is too old, expected 3.6 or newer"),
        ("__version__ = '3.6.0'", "7.0", "triton 3.6.0 is too old, expected 3.9 or newer on AMD's GPUs"),
    ],
)  # fmt: skip
def test_broken_triton_is_reported(module, hip, words, tmp_path, monkeypatch):
    (tmp_path / "triton.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    backend = availability._triton_backend()
    assert not backend.available and words in backend.reason


def test_torch_without_flex_attention_is_reported(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "flex_attention", raising=False)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", None)
    backend = availability._flex_backend()
    assert not backend.available and "has no FlexAttention" in backend.reason


def test_broken_triton_affects_no_other_backend(tmp_path):
    """In a separate process, info, the list, the constants and the functions agree."""
    (tmp_path / "triton.py").write_text("raise OSError('no such driver')")
    program = (
        "import os, sys, torch\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "os.environ.pop('TRITON_INTERPRET', None)\n"
        "import flash_dmattn\n"
        "from flash_dmattn.__main__ import main\n"
        "main(['info'])\n"
        "assert not flash_dmattn.TRITON_AVAILABLE\n"
        "assert 'triton' not in flash_dmattn.get_available_backends()\n"
        "q = torch.randn(1, 9, 2, 16)\n"
        "assert flash_dmattn.flash_dmattn_func_auto()(q, q, q, is_causal=True).isfinite().all()\n"
        "try:\n"
        "    flash_dmattn.triton_dmattn_func(q, q, q)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    done = run_forked(program)
    reason = "triton cannot be imported: OSError: no such driver"
    assert f"triton     no   {reason}" in done.stdout
    assert f"backend: got 'triton', which cannot run: {reason}" in done.stdout


@pytest.mark.parametrize("best", ["triton", "flex", "cuda", "cpu"])
def test_default_is_best_backend(best, monkeypatch):
    """Triton or flex is the default on a GPU that the library does not support. Otherwise the library is, on CPU and GPU."""
    monkeypatch.setattr(functional, "get_available_backends", lambda: [best, "cpu", "reference"])
    monkeypatch.setattr(functional, "check_backend_runs", lambda name: None)
    function = flash_dmattn.flash_dmattn_func_auto()
    if best in ("triton", "flex"):
        assert function.keywords["backend"] == best
    else:
        assert function is flash_dmattn.flash_dmattn_func


@pytest.mark.gpu
@pytest.mark.skipif(
    "FLASH_DMATTN_TEST_CUDA_BUILD" not in os.environ, reason="not the build of make test-cuda-build"
)
def test_build_with_cuda_loads_anywhere_and_keeps_its_symbols():
    assert CUDA.available or "build" not in CUDA.reason, CUDA.reason
    if shutil.which("nm") is None:
        pytest.skip("no nm to list symbols with")
    library = next(iter(torch.ops.loaded_libraries))
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert not [
        n for n in names if "cuda" in n.lower() or "flash_dmattn" in n or n.startswith("cu")
    ]
