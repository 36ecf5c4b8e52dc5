"""Tests of the CUDA kernels. Where they cannot run, each file is imported, so that its names and cases are checked, and then
skipped as a whole, before its thousands of cases are made."""

import pytest

from gpu import REASON_WITHOUT_GPU


class SkippedModule(pytest.Module):
    def collect(self):
        self.obj  # noqa: B018  # imports the module
        pytest.skip(REASON_WITHOUT_GPU, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if REASON_WITHOUT_GPU:
        return SkippedModule.from_parent(parent, path=module_path)
