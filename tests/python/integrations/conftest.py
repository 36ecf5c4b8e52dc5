"""Skips files that import transformers at their top if it is not installed."""

import importlib.util
import re

import pytest

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


class SkippedModule(pytest.Module):
    def collect(self):
        pytest.skip("transformers is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    imports = re.search(r"^(import|from) transformers\b", module_path.read_text(), re.MULTILINE)
    if imports and not HAS_TRANSFORMERS:
        return SkippedModule.from_parent(parent, path=module_path)
