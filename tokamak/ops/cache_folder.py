"""Where do compiled kernels and measurements lie between starts?"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """A folder of the user's cache; `XDG_CACHE_HOME` moves it."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "tokamak" / "kernels"
