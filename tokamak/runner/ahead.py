"""How do kernels get compiled while weights load? A process of its own does it, where none was compiled before.

`CompileAhead` starts `compile_ahead.py`, which fills Triton's cache on disk, and waits for its end. What it could not
compile the engine compiles when it meets it, and says so. A mark in Triton's cache tells the next start that all is
there, so that it starts no process.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from tokamak import ops
from tokamak.checkpoint.source import open_checkpoint
from tokamak.config.engine import EngineConfig
from tokamak.device.facts import device_facts
from tokamak.runner.graph_cost import cost_path

logger = logging.getLogger(__name__)

COMPILER_MODULE = "tokamak.runner.compile_ahead"
"""Run with `python -m`; tests name a module of their own."""

WAIT_S = 120.0
"""How long a start waits for kernels before it goes on and compiles what is missing itself."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a compiling process reads from its standard input."""

    config: EngineConfig
    multiprocessors: int
    """Of the GPU; how some kernels divide their work depends on it."""


class CompileAhead:
    """Kernels that are compiled beside a start, or none. Use it in a `with`: what is not waited for is ended."""

    def __init__(self, config: EngineConfig, *, module: str = COMPILER_MODULE) -> None:
        """Start the process, which imports what it needs while the caller goes on."""
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        if is_needed(config):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    @property
    def running(self) -> bool:
        """Whether a process compiles."""
        return self._process is not None

    def order(self, multiprocessors: int) -> None:
        """Say what to compile."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        order = Order(config=self._config, multiprocessors=multiprocessors)
        try:
            self._process.stdin.write(msgspec.msgpack.encode(order))
            self._process.stdin.close()
        except BrokenPipeError:
            # It has ended; `wait` says how.
            logger.debug("the process that compiles kernels took no order")

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Until all is compiled. What is not is compiled when it is met: that is slower, and logged."""
        if self._process is None:
            return
        began = time.perf_counter()
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning(
                "kernels are not compiled after %.0f s; the engine compiles the others when it meets them",
                timeout_s,
            )
        else:
            if code:
                logger.warning(
                    "compiling kernels ahead ended with %d; the engine compiles them when it meets them",
                    code,
                )
            logger.info("waited %.1f s for kernels", time.perf_counter() - began)
        self._end()

    def _end(self) -> None:
        """End what still runs."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _environment() -> dict[str, str]:
    """Ours, with the same modules in reach, and without threads beside the one that divides itself."""
    paths = [path or os.getcwd() for path in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def is_needed(config: EngineConfig) -> bool:
    """Whether a start with this config would compile kernels one after the other."""
    if config.model.device == "cpu" or not device_facts(config.model.device).has("triton"):
        return False
    return not mark_path(config).exists()


def finished(config: EngineConfig, kernels: int) -> None:
    """Leave the mark that all kernels of a config lie in Triton's cache."""
    path = mark_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{kernels}\n", encoding="utf-8")


def mark_path(config: EngineConfig) -> Path:
    """Where the mark of a config lies: beside the kernels, so that who deletes them deletes it."""
    facts, graphs, limits = device_facts(config.model.device), config.graphs, config.scheduler
    checkpoint = open_checkpoint(Path(config.model.path))
    key = (
        cost_path(config, checkpoint.config).stem,
        facts.arch,
        facts.name,
        graphs.when,
        graphs.request_sizes,
        graphs.token_sizes,
        graphs.token_max,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        _triton_version(),
        _source_digest(),
    )
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return _triton_cache() / f"tokamak-{digest[:32]}"


def _triton_version() -> str:
    return importlib.metadata.version("triton")


def _triton_cache() -> Path:
    """Where Triton keeps compiled kernels; its own rule, read without importing it."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(folder) if folder else Path(home) / ".triton" / "cache"


def _source_digest() -> str:
    """A digest of every file that holds kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(ops.__path__[0]).rglob("triton*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
