"""Skips tests of several ranks if torch has no distributed package, because their files cannot be imported then."""

import pytest
import torch
import torch.distributed as dist


class SkippedModule(pytest.Module):
    def collect(self):
        pytest.skip("torch without distributed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if not dist.is_available():
        return SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def one_thread():
    """Runs torch with one thread, because each rank is already a thread or a process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
