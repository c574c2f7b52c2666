"""How many tokens a second can the front end carry? Its processor time per token, without an engine's.

    python -m benchmarks.serving.front_end --streams 128 --tokens 256 --step-ms 5

The real app under uvicorn over a FrontEnd whose news come from a timer: every step one token for every stream,
through msgpack like an engine's. A process of its own reads the streams. Processor time of the serving process over
its tokens says what one costs; `--profile` shows where.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import random
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterable

import msgspec
import uvicorn

from tokamak.checkpoint.byte_tokenizer import byte_tokenizer
from tokamak.config.engine import ServerConfig
from tokamak.core.generation import EngineInfo
from tokamak.core.request import FinishReason
from tokamak.engine.front_end import FrontEnd
from tokamak.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    RequestUpdate,
    StepUpdates,
    ToEngine,
)
from tokamak.server.app import create_app

VOCAB_TOKENS = 151_936


class TimedFrontEnd(FrontEnd):
    """A front end whose engine is a timer: a step gives every request one token."""

    def __init__(self, step_s: float) -> None:
        info = EngineInfo(
            served_names=("timed",),
            max_model_len=4096,
            vocab_tokens=VOCAB_TOKENS,
            block_tokens=16,
            total_blocks=1 << 16,
            max_num_seqs=1024,
            started_unix_s=time.time(),
        )
        super().__init__(info, byte_tokenizer(VOCAB_TOKENS), None)
        self.tokens = 0
        self._step_s = step_s
        self._left: dict[str, int] = {}
        self._decoder = msgspec.msgpack.Decoder(StepUpdates)
        self._chance = random.Random(0)
        self._task: asyncio.Task[None] | None = None

    def _send(self, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            self._left[message.request_id] = message.max_tokens
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self._left.pop(request_id, None)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._turn())

    async def _turn(self) -> None:
        due_s = time.perf_counter()
        while True:
            due_s = max(due_s + self._step_s, time.perf_counter() - self._step_s)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if self._left:
                self._receive(self._decoder.decode(self._step()))

    def _step(self) -> bytes:
        """The news of a step as they cross from an engine."""
        updates: list[RequestUpdate] = []
        for request_id in [*self._left]:
            self._left[request_id] -= 1
            ends = not self._left[request_id]
            updates.append(
                RequestUpdate(
                    request_id=request_id,
                    token_ids=[self._chance.randrange(300, VOCAB_TOKENS)],
                    finish_reason=FinishReason.LENGTH if ends else None,
                )
            )
            if ends:
                del self._left[request_id]
        self.tokens += len(updates)
        return msgspec.msgpack.encode(StepUpdates(updates=updates, stats=EngineStats()))

    async def close(self) -> None:
        """See EngineClient."""
        if self._task is not None:
            self._task.cancel()


def main() -> None:
    """Serve, let another process read, and print what a token cost."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=1024, help="token ids of a prompt")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--http", default="auto", help="uvicorn's parser: auto, httptools or h11")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--read", type=int, help="read from this port, in this process")
    asked = parser.parse_args()
    if asked.read:
        print(json.dumps(read_all(asked.read, asked)))
        return
    asyncio_run(measure(asked), asked.http)


def asyncio_run(work: object, http: str) -> None:
    """Run on the loop that `tokamak serve` uses."""
    factory = uvicorn.Config("x", http=http).get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work)


async def measure(asked: argparse.Namespace) -> None:
    """One run."""
    engine = TimedFrontEnd(asked.step_ms / 1e3)
    config = ServerConfig(
        host="127.0.0.1",
        port=0,
        uds=None,
        api_keys=(),
        allowed_origins=(),
        max_body_bytes=1 << 24,
        drain_timeout_s=1.0,
        log_level="info",
    )
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(engine, config), log_config=None, access_log=False, http=asked.http
        )
    )
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    port = listening.getsockname()[1]
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    command = [sys.executable, "-m", "benchmarks.serving.front_end", "--read", str(port)]
    for name in ("streams", "prompt", "tokens"):
        command += [f"--{name}", str(getattr(asked, name))]
    profile = cProfile.Profile()
    if asked.profile:
        profile.enable()
    began_s, busy_s = time.perf_counter(), time.process_time()
    reader = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await reader.communicate()
    took_s, busy_s = time.perf_counter() - began_s, time.process_time() - busy_s
    profile.disable()
    seen = json.loads(out)
    each_us = busy_s / engine.tokens * 1e6
    print(
        f"{asked.streams} streams, {engine.tokens} tokens, {seen['events']} events, "
        f"{seen['bytes'] / engine.tokens:.0f} bytes a token; {seen['seconds']:.2f} s, "
        f"{engine.tokens / seen['seconds']:.0f} tokens/s seen; busy {busy_s:.2f} s of {took_s:.2f}: "
        f"{each_us:.1f} us a token, {1e6 / each_us:.0f} tokens/s at most"
    )
    if asked.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    server.should_exit = True
    await serving
    await engine.close()


def read_all(port: int, asked: argparse.Namespace) -> dict[str, float]:
    """Ask for all streams at once and read them to their ends, doing as little as possible."""
    body = json.dumps(
        {
            "prompt": random.Random(1).choices(range(300, VOCAB_TOKENS), k=asked.prompt),
            "max_tokens": asked.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    ready = selectors.DefaultSelector()
    began_s = time.perf_counter()
    for _ in range(asked.streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall((head + body).encode())
        ready.register(connection, selectors.EVENT_READ)
    got = list(_parts(ready))
    seconds = time.perf_counter() - began_s
    return {
        "seconds": seconds,
        "events": sum(part.count(b"data: {") for part in got),
        "bytes": sum(map(len, got)),
    }


def _parts(ready: selectors.BaseSelector) -> Iterable[bytes]:
    while ready.get_map():
        for key, _ in ready.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            part = connection.recv(1 << 20)
            if not part:
                ready.unregister(connection)
                connection.close()
            yield part


if __name__ == "__main__":
    main()
