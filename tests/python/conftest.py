import pytest
import torch

from flash_dmattn.check.run import poisoned_memory


@pytest.fixture(scope="session", autouse=True)
def poisoned():
    """The library's outputs and workspace come from torch, so whatever it forgets to write shows."""
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(20240601)
