import pytest

from harness import memory


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    """Skips the garbage collection before a measurement of peak memory. It takes a second after many imports, and no test here is
    about it."""
    monkeypatch.setattr(memory.gc, "collect", lambda *generation: 0)
