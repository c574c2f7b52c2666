"""`python -m tokamak.engine` is an engine process; `launch.py` starts it and speaks to it."""

from __future__ import annotations

import importlib
import sys

from tokamak.config.engine import EngineConfig
from tokamak.engine.core_face import CoreFace
from tokamak.engine.engine_process import run
from tokamak.runner.ahead import CompileAhead


def build(config: EngineConfig) -> CoreFace:
    """An engine core. Who compiles kernels for it starts before PyTorch is imported here, which takes seconds."""
    with CompileAhead(config) as ahead:
        core = importlib.import_module("tokamak.engine.core")
        return core.EngineCore(config, core.InProcessExecutor(config, ahead=ahead))


if __name__ == "__main__":
    sys.exit(run(build))
