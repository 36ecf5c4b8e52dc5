import pytest

from flash_dmattn.check import memory


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    """A peak of memory collects garbage before it, for a second where tests have imported much; no test here is about that."""
    monkeypatch.setattr(memory.gc, "collect", lambda *generation: 0)
