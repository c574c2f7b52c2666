"""Where fetched and parsed models are kept on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from tokamak.config.places import CACHE_VARIABLE


def cache_folder() -> Path:
    """TOKAMAK_CACHE, or `tokamak` in XDG_CACHE_HOME, or ~/.cache/tokamak. It may not exist yet."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "tokamak"
