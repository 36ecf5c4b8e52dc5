import atexit
import gc
import os

import pytest

# While modules and tests are made, collections take seconds and free nothing.
gc.disable()


def pytest_configure(config):
    """Interprets the Triton kernels where there is no GPU. Triton looks at the variable when they are defined."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # the controller of pytest-xdist runs no tests and needs no torch
    # Inductor's pool of processes costs more than all compilations here.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ.get("TRITON_INTERPRET") == "1":
        from quick_interpreter import quicken_interpreter

        quicken_interpreter()


def pytest_collection_finish():
    """Excludes the objects of all modules from garbage collection, where they cost 0.2 seconds per full collection, until the
    interpreter ends: pytest's last collections take seconds, and nanobind lists what the interpreter's does not free."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def poisoned():
    """Fills new memory with NaN. The library's outputs and workspace come from torch, so elements that it forgets to write show."""
    from flash_dmattn.check.run import poisoned_memory

    with poisoned_memory():
        yield


@pytest.fixture(autouse=True)
def fixed_seed():
    import torch

    torch.manual_seed(20240601)


@pytest.fixture
def one_thread():
    """Runs torch with one thread, because on small tensors threads only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """Leaves FlexAttention uncompiled, because compiling takes seconds. It calls the same functions for scores and masks."""
    from flash_dmattn._backends import flex

    monkeypatch.setattr(flex, "_compiled_flex_attention", lambda form: flex.flex_attention)


@pytest.fixture
def compiled_on_gpu(request):
    """Compiles FlexAttention only on a GPU, because on the CPU torch takes a quarter of a minute. Uncompiled code calls the same
    functions for scores and masks, but does not read lists of blocks."""
    import torch

    if not torch.cuda.is_available():
        request.getfixturevalue("uncompiled_flex")


@pytest.fixture
def check_mode(monkeypatch):
    """Turns the check on, as FLASH_DMATTN_CHECK_FINITE=1 does, which a process reads only once."""
    from flash_dmattn._core import finite

    monkeypatch.setattr(finite, "_setting", lambda: True)
