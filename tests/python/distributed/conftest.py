"""Skips tests of several ranks if torch has no distributed package, because their files cannot be imported then."""

import pytest
import torch.distributed as dist


class SkippedModule(pytest.Module):
    def collect(self):
        pytest.skip("torch without distributed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if not dist.is_available():
        return SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def one_thread_for_each_rank(one_thread):
    """Each rank is already a thread or a process."""
