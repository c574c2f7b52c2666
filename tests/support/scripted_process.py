"""An engine process over a ScriptedCore: `launch.ENGINE_MODULE` of tests.

The model path of its config says how it behaves: `scripted:slow`, `scripted:fails-at-step`, … (see BEHAVIOURS).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.scripted_engine import VOCAB_TOKENS, ScriptedCore, says
from tokamak.config.engine import EngineConfig, ModelFacts
from tokamak.config.options import EngineOptions
from tokamak.config.settle import settle_engine
from tokamak.device.facts import cpu_facts
from tokamak.engine.engine_process import run
from tokamak.errors import CheckpointError


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
    "scripted:full": lambda: ScriptedCore(max_waiting=0),
    "scripted:refuses": _refuses,
    "scripted:breaks": _breaks,
    "scripted:leaves": _leaves,
}


def a_scripted_config(behaviour: str) -> EngineConfig:
    """A config whose model path names a behaviour; nothing else of it is read."""
    facts = ModelFacts(
        architecture="Scripted",
        vocab_tokens=VOCAB_TOKENS,
        max_position_tokens=4096,
        stored_dtype="none",
        weight_bytes=0,
        parameters=0,
    )
    options = EngineOptions(model="scripted")
    return settle_engine(options, cpu_facts(), facts, Path(f"scripted:{behaviour}"))


def build(config: EngineConfig) -> ScriptedCore:
    """The core whose behaviour the config's model path names."""
    return BEHAVIOURS[config.model.path]()


if __name__ == "__main__":
    sys.exit(run(build))
