import gc
import os

import pytest
import torch

# Without a GPU the Triton kernels are interpreted. Triton looks at this when they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from flash_dmattn._core import finite
from flash_dmattn.check.run import poisoned_memory
from quick_interpreter import quicken_interpreter

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken_interpreter()


# While modules and tests are made, collections take seconds and free nothing.
gc.disable()


def pytest_collection_finish():
    """Excludes the objects of all modules from garbage collection, where they cost 0.2 seconds per full collection."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def poisoned():
    """Fills new memory with NaN. The library's outputs and workspace come from torch, so elements that it forgets to write show."""
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(20240601)


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """Leaves FlexAttention uncompiled, because compiling takes seconds. It calls the same functions for scores and masks."""
    from flash_dmattn._backends import flex

    monkeypatch.setattr(flex, "_compiled_flex_attention", lambda form: flex.flex_attention)


@pytest.fixture
def check_mode(monkeypatch):
    """Turns the check on, as FLASH_DMATTN_CHECK_FINITE=1 does, which a process reads only once."""
    monkeypatch.setattr(finite, "_setting", lambda: True)
