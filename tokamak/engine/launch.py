"""How does an engine process come up, and how does it go?

`EngineProcess` starts one, waits until it serves, notices its end and stops it. The process is in a group of its own,
so that Ctrl-C in a terminal reaches the front end alone, which then ends the engine in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from tokamak import errors
from tokamak.config.engine import EngineConfig
from tokamak.device.openmp import let_threads_sleep
from tokamak.engine.messages import Failed, FromEngine, Ready, Shutdown, ToEngine
from tokamak.engine.transport import Channel, StartEngine, front_end_channel
from tokamak.errors import EngineDeadError, EngineError, OverloadedError, TokamakError

ENGINE_MODULE = "tokamak.engine"
"""Run with `python -m`; tests name a module of their own."""

STARTUP_POLL_S = 0.005

CLOSE_TIMEOUT_S = 10.0
"""How long an engine may take to end before it is killed: one step, then the release of its memory."""


class EngineProcess:
    """One engine process and the front end's channel to it."""

    def __init__(self, config: EngineConfig, *, module: str = ENGINE_MODULE) -> None:
        """Start the process; it loads the model while the caller goes on.

        Start it from the main thread, so that the system ends it even if this process is killed.
        """
        self.channel: Channel[FromEngine, ToEngine] = front_end_channel()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            env=_environment(),
            process_group=0,
        )
        self._send_order(config)

    @property
    def process_id(self) -> int:
        """The system's id of the process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    async def wait_ready(self) -> Ready:
        """Wait until the engine serves.

        Raises:
            OptionError, ModelError, NoBackendError: what the engine found wrong while it loaded.
            EngineError: it failed for another reason; its log has more.
        """
        while True:
            running = self.running
            for message in self.channel.receive():
                if isinstance(message, Ready):
                    self.channel.forget_endpoint()
                    return message
                if isinstance(message, Failed):
                    raise startup_error(message)
            if not running:
                raise EngineError(
                    f"{self.ending()} while it started", hint="its output above has the reason"
                )
            await asyncio.sleep(STARTUP_POLL_S)

    def when_ended(self, tell: Callable[[], None]) -> None:
        """Call `tell` from another thread once the process has ended."""

        def watch() -> None:
            self._process.wait()
            tell()

        threading.Thread(target=watch, name="engine-watch", daemon=True).start()

    def ending(self) -> str:
        """How the process ended, as the beginning of a sentence."""
        code = self._process.poll()
        if code is None:
            return f"the engine process {self.process_id} does not answer"
        if code < 0:
            name = signal.Signals(-code).name
            memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
            return f"the engine process was killed by {name}{memory}"
        return f"the engine process ended with exit code {code}"

    async def stop(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the process in order, or kill it when it takes too long."""
        if self.running and self.channel.send(Shutdown()):
            ends_s = time.monotonic() + timeout_s
            while self.running and time.monotonic() < ends_s:
                await asyncio.sleep(STARTUP_POLL_S)
        self.kill()

    def kill(self) -> None:
        """End the process now and free what belongs to it. May be called again."""
        if self.running:
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.channel.close()

    def _send_order(self, config: EngineConfig) -> None:
        order = msgspec.msgpack.encode(
            StartEngine(
                endpoint=self.channel.endpoint,
                config=config,
                parent_id=os.getpid(),
                dies_with_parent=threading.current_thread() is threading.main_thread(),
            )
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(order).to_bytes(8, "big") + order)
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # It ended already; wait_ready says how.


def startup_error(failed: Failed) -> TokamakError:
    """The exception for what an engine said when it could not start: of the class it raised there."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, TokamakError) and kind is not OverloadedError:
        return kind(failed.message)
    return EngineError(f"the engine could not start: {failed.message}")


def death_error(message: str) -> EngineDeadError:
    """The exception for requests of an engine that is gone."""
    return EngineDeadError(message, hint="restart the server; its log has the reason")


def _environment() -> dict[str, str]:
    """Ours, with the same modules in reach: a checkout that is not installed works too."""
    paths = [path or os.getcwd() for path in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    let_threads_sleep(environment)
    return environment
