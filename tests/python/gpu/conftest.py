"""Skips tests of the CUDA kernels where they cannot run. Each file is still imported, which checks its names and cases, and then
skipped as a whole before pytest makes its thousands of cases."""

import pytest

from gpu import REASON_WITHOUT_GPU


class SkippedModule(pytest.Module):
    def collect(self):
        self.obj  # noqa: B018  # imports the module
        pytest.skip(REASON_WITHOUT_GPU, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if REASON_WITHOUT_GPU:
        return SkippedModule.from_parent(parent, path=module_path)
