"""Where the library keeps what it has downloaded or compiled."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The library's folder in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ortholand"
