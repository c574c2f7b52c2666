"""The front end comes up without torch and without waiting for it."""

from __future__ import annotations

import subprocess
import sys

FRONT_END = """
import sys
import tokamak
import tokamak.cli.main, tokamak.cli.chat, tokamak.cli.serve, tokamak.cli.serving, tokamak.cli.bench, tokamak.cli.doctor
import tokamak.cli.model, tokamak.cli.plan, tokamak.config.settle, tokamak.checkpoint.source, tokamak.checkpoint.tokenizer
import tokamak.engine.client, tokamak.engine.configure, tokamak.engine.outputs, tokamak.engine.process_client
import tokamak.server.app, tokamak.telemetry.metrics, tokamak.text.detokenizer
heavy = [name for name in ("torch", "transformers", "llvmlite", "triton") if name in sys.modules]
assert not heavy, heavy
"""

SCHEDULER = """
import sys
import tokamak.engine.scheduler, tokamak.engine.policy, tokamak.core.plan, tokamak.core.request
import tokamak.cache.blocks, tokamak.cache.prefix, tokamak.cache.groups
assert "torch" not in sys.modules
"""

COMMAND = """
import sys
from tokamak.cli.main import run
run(["--version"]); run(["--help"])
try:
    run(["serve", "--help"])
except SystemExit:
    pass
assert "torch" not in sys.modules
"""


def imports(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_front_end_imports_without_torch() -> None:
    imports(FRONT_END)


def test_the_scheduler_imports_without_torch() -> None:
    imports(SCHEDULER)


def test_help_and_version_need_no_torch() -> None:
    imports(COMMAND)
