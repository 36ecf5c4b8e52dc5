"""Marks tests of the CUDA kernels, and skips them where they cannot run. Each file is still imported, which checks its names and cases, and then
skipped as a whole before pytest makes its thousands of cases."""

from pathlib import Path

import pytest

from gpu import REASON_WITHOUT_GPU


class SkippedModule(pytest.Module):
    def collect(self):
        self.obj  # noqa: B018  # imports the module
        pytest.skip(REASON_WITHOUT_GPU, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if REASON_WITHOUT_GPU:
        return SkippedModule.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
