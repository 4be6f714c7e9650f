"""An empty cache of compiled code, for tests that fill it or break it."""

import pytest

from ortholand import native


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder, and no compiled code in memory."""
    monkeypatch.setenv("ORTHOLAND_CACHE", str(tmp_path))
    monkeypatch.delenv("ORTHOLAND_NATIVE", raising=False)
    native._library.cache_clear()
    yield tmp_path / "native"
    native._library.cache_clear()
