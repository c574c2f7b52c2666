"""`python -m tokamak.engine` is an engine process; `launch.py` starts it and speaks to it."""

from __future__ import annotations

import sys

from tokamak.engine.core import EngineCore
from tokamak.engine.engine_process import run

if __name__ == "__main__":
    sys.exit(run(EngineCore))
