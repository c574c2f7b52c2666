"""An engine process over a ScriptedCore: `launch.ENGINE_MODULE` of tests.

The model path of its config says how it behaves: `scripted:slow`, `scripted:fails-at-step`, … (see BEHAVIOURS).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tests.support.scripted_engine import ScriptedCore, says
from tokamak.config.engine import EngineConfig
from tokamak.engine.engine_process import run
from tokamak.engine.messages import EngineReport
from tokamak.errors import CheckpointError, GraphMismatch


def _refuses() -> ScriptedCore:
    raise CheckpointError("model.safetensors ends at byte 7 of 100", hint="fetch it again")


def _breaks() -> ScriptedCore:
    raise ZeroDivisionError("a bug\nof two lines")


def _leaves() -> ScriptedCore:
    os._exit(9)


BEHAVIOURS: dict[str, Callable[[], ScriptedCore]] = {
    "scripted:counts": ScriptedCore,
    "scripted:slow": lambda: ScriptedCore(step_s=0.02),
    "scripted:says-hello": lambda: ScriptedCore(script=says("Hello, wörld.")),
    "scripted:fails-at-step": lambda: ScriptedCore(fail_step=5),
    "scripted:differs": lambda: ScriptedCore(
        fail_step=5,
        failure=GraphMismatch("bucket 4 of decode gave other numbers", hint="use graphs=off"),
    ),
    "scripted:reports": lambda: ScriptedCore(
        told=EngineReport(graphs_when="startup", reasons={"bucket": 3})
    ),
    "scripted:full": lambda: ScriptedCore(max_waiting=0),
    "scripted:refuses": _refuses,
    "scripted:breaks": _breaks,
    "scripted:leaves": _leaves,
}


def build(config: EngineConfig) -> ScriptedCore:
    """The core whose behaviour the config's model path names."""
    return BEHAVIOURS[config.model.path]()


if __name__ == "__main__":
    sys.exit(run(build))
