"""How does a server come up and go down? An engine process that loads, HTTP over it, and the drain at the end.

`/health/live` answers while the model loads. SIGTERM or Ctrl-C drains: new requests are refused, running ones may
end; a second signal ends those, a third leaves at once. A server whose engine died exits, for a supervisor to restart
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from tokamak.cli.address import address
from tokamak.config.engine import EngineConfig, ServerConfig
from tokamak.engine.client import EngineClient
from tokamak.engine.launch import EngineProcess
from tokamak.engine.process_client import start_engine
from tokamak.errors import OptionError, TokamakError
from tokamak.server.app import create_app

logger = logging.getLogger(__name__)

ENGINE_WATCH_S = 1.0

MOST_SIGNALS = 2

KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than clients keep theirs, so that it is they who close it."""

CLOSE_TIMEOUT_S = 5
"""After the drain: how long uvicorn waits for connections that are still open."""


def serve(
    process: EngineProcess,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    listening: socket.socket,
) -> int:
    """Serve until told to end; returns the exit status."""
    return Serving(process, engine_config, server_config, listening).run()


class Serving:
    """One server from start to end."""

    def __init__(
        self,
        process: EngineProcess,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        listening: socket.socket,
    ) -> None:
        self._process = process
        self._engine_config = engine_config
        self._config = server_config
        self._socket = listening
        self._client: EngineClient | None = None
        self._failure: TokamakError | None = None
        self._started_s = time.monotonic()
        self._stopping: asyncio.Task[None] | None = None
        self._signals = 0
        app: FastAPI = create_app(self._connect, server_config)
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    def run(self) -> int:
        """Serve; returns the exit status."""
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(self._serve())
        if self._failure is None:
            return 0
        return 2 if isinstance(self._failure, OptionError) else 1

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        with _signals(loop, self._stop):
            logger.info("listening on %s; loading %s", address(self._socket), self._model_name)
            watch = asyncio.create_task(self._watch_engine())
            try:
                await self._server.serve(sockets=[self._socket])
            finally:
                watch.cancel()

    async def _connect(self) -> EngineClient:
        """Wait for the engine; a failure ends the server, since nothing can be served."""
        try:
            self._client = await start_engine(self._engine_config, process=self._process)
        except TokamakError as error:
            self._failure = error
            self._server.should_exit = True
            raise
        seconds = time.monotonic() - self._started_s
        logger.info("%s is ready after %.1f s", self._model_name, seconds)
        return self._client

    @property
    def _model_name(self) -> str:
        return self._engine_config.model.served_names[0]

    def _stop(self) -> None:
        """A signal came: drain; at the second one end what runs; at the third leave at once."""
        self._signals += 1
        if self._signals > MOST_SIGNALS:
            self._server.force_exit = True
            return
        if self._stopping is not None:
            self._stopping.cancel()
        timeout_s = self._config.drain_timeout_s if self._signals == 1 else 0.0
        self._stopping = asyncio.get_running_loop().create_task(self._drain(timeout_s))

    async def _drain(self, timeout_s: float) -> None:
        if self._client is not None:
            running = self._client.health().unfinished_requests
            logger.info("draining %d requests for at most %.0f s", running, timeout_s)
            if not await self._client.drain(timeout_s):
                logger.warning("the time to drain is over; what still runs is ended")
                # Their answers end with `abort`, so no client waits on a dead connection.
                await self._client.close()
        self._server.should_exit = True

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(ENGINE_WATCH_S)
            if self._client is None or self._stopping is not None:
                continue
            health = self._client.health()
            if not health.alive:
                logger.critical("the engine is gone, so the server ends: %s", health.failure)
                self._failure = TokamakError(health.failure or "the engine is gone")
                self._server.should_exit = True
                return


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: it would close connections where we drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Serving`."""
        yield


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> Iterator[None]:
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
