import os

import pytest
import torch

# Without a GPU the Triton kernels are interpreted. Triton looks at this when they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from flash_dmattn.check.run import poisoned_memory
from quick_interpreter import patch_once_a_launch

if os.environ.get("TRITON_INTERPRET") == "1":
    patch_once_a_launch()


@pytest.fixture(scope="session", autouse=True)
def poisoned():
    """The library's outputs and workspace come from torch, so whatever it forgets to write shows."""
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(20240601)
