"""How does a test talk to a server over real HTTP?

`serving` runs the app under uvicorn on a loopback port, in a thread of its own, with a scripted engine on the same
event loop:

    with serving(says("Hello.")) as server:
        answer = server.http.post("/v1/completions", json={"prompt": "x"})
        assert server.engine.core.aborted == []
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx
import uvicorn

from tests.support.scripted_engine import Script, ScriptedCore, ScriptedEngine, counts
from tokamak.config.engine import ServerConfig
from tokamak.engine.client import EngineClient
from tokamak.server.app import create_app
from tokamak.server.state import Connect, ServerState
from tokamak.text.chat_format import ChatFormat

T = TypeVar("T")

CONFIG = ServerConfig(
    host="127.0.0.1",
    port=0,
    uds=None,
    api_keys=(),
    allowed_origins=(),
    max_body_bytes=1 << 20,
    drain_timeout_s=5.0,
    log_level="info",
)


def a_config(**changes: Any) -> ServerConfig:
    """A server config with these fields changed."""
    return replace(CONFIG, **changes)


@dataclass
class LiveServer:
    """A running server, seen from outside."""

    url: str
    http: httpx.Client
    state: ServerState
    loop: asyncio.AbstractEventLoop
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))
    _begun: list[Future[Any]] = field(default_factory=list)

    @property
    def engine(self) -> ScriptedEngine:
        """The scripted engine, once it is loaded."""
        engine = self.state.client
        assert isinstance(engine, ScriptedEngine)
        return engine

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine function on the server's event loop."""

        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def call_soon(self, work: Callable[[], object]) -> None:
        """Run a plain function on the server's event loop."""

        async def run() -> None:
            work()

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Run a function on a thread of its own; the server ends after it, and fails if it did."""
        begun = self._threads.submit(work)
        self._begun.append(begun)
        return begun

    def end_what_runs_beside(self) -> None:
        """Wait for every `beside`; raises the first error of one."""
        self._threads.shutdown()
        for begun in self._begun:
            begun.result()

    def chat(self, text: str = "Hi", **fields: Any) -> httpx.Response:
        """One chat request with one user message."""
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "abc", **fields: Any) -> httpx.Response:
        """One completion request."""
        return self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == name
        ]
        assert values, f"no metric {name}"
        return sum(values)


@contextmanager
def serving(
    script: Script = counts,
    *,
    core: ScriptedCore | None = None,
    token_s: float = 0.0,
    before_connect: Callable[[], Awaitable[None]] | None = None,
    served_names: tuple[str, ...] = ("scripted",),
    template: ChatFormat | None = None,
    **config: Any,
) -> Iterator[LiveServer]:
    """A server over a scripted engine; with `before_connect` the engine comes after that has run."""

    async def connect() -> EngineClient:
        if before_connect is not None:
            await before_connect()
        engine = ScriptedEngine(
            script, core=core, token_s=token_s, served_names=served_names, template=template
        )
        engine.start()
        return engine

    with serving_engine(connect, wait=before_connect is None, **config) as server:
        yield server


@contextmanager
def serving_engine(connect: Connect, *, wait: bool = True, **config: Any) -> Iterator[LiveServer]:
    """A server over any engine; `wait` until it is ready."""
    servers: list[uvicorn.Server] = []
    loops: list[asyncio.AbstractEventLoop] = []
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    app = create_app(connect, a_config(**config))
    state: ServerState = app.state.server

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        settings = uvicorn.Config(
            app,
            log_config=None,
            lifespan="on",
            timeout_graceful_shutdown=2,
            # Longer than clients keep theirs, so that none is closed as it is used again.
            timeout_keep_alive=75,
        )
        servers.append(uvicorn.Server(settings))
        await servers[0].serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    with httpx.Client(base_url=url, timeout=30) as http:
        try:
            eventually(lambda: bool(servers) and servers[0].started)
            if wait:
                eventually(lambda: state.client is not None, within_s=50)
            server = LiveServer(url, http, state, loops[0])
            try:
                yield server
            finally:
                server.end_what_runs_beside()
        finally:
            if servers:
                servers[0].should_exit = True
            thread.join(15)
            listening.close()
    assert not thread.is_alive(), "the server did not end"


def eventually(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until something holds; fail if it does not in time."""
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"did not come true within {within_s} s"
        time.sleep(0.005)


def stream_events(response: httpx.Response) -> list[Any]:
    """The JSON of a stream's events, checked to end with [DONE]."""
    events = list(data_of(response.iter_lines()))
    assert events[-1] == "[DONE]", events[-1]
    return [json.loads(event) for event in events[:-1]]


def data_of(lines: Iterator[str]) -> Generator[str]:
    """The data of a stream's events."""
    for line in lines:
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
