"""Tests of several ranks. Where torch has no distributed, their files cannot be imported, and are skipped."""

import pytest
import torch.distributed as dist


class SkippedModule(pytest.Module):
    def collect(self):
        pytest.skip("torch without distributed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if not dist.is_available():
        return SkippedModule.from_parent(parent, path=module_path)
