import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory():
    """Fills everything that torch allocates without initialising it with NaN (and 0xFF bytes).

    The library's outputs and workspace come from torch, so whatever it forgets to write shows.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(20240601)
