"""Where the library keeps downloaded data and compiled code."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The library's folder in the user's cache.

    Raises:
        RuntimeError: if the user has no home folder and no variable names another one.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "ortholand"
    try:
        return Path.home() / ".cache" / "ortholand"
    except RuntimeError as error:
        raise RuntimeError(
            "The cache is kept in the user's home folder, and this user has none "
            "(HOME is not set): set XDG_CACHE_HOME to a folder for it."
        ) from error
