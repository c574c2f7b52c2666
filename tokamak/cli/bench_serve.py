"""How does a server behave under load? Requests leave at random times, whether or not answers came back.

An open loop: arrivals are a Poisson process (or all at once), so a slow server sees its queue grow as it would
with real clients. The HTTP client is small on purpose: one connection a request, server-sent events read as
they come, little work per token, since it shares the machine with what it measures.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tokamak.errors import EngineError, OptionError

READ_LIMIT_BYTES = 16 * 1024**2
FIRST_RANDOM_ID = 100
"""Vocabularies begin with special tokens and single bytes; random prompts leave them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where requests go."""

    host: str
    port: int
    tls: bool = False
    uds: str | None = None
    api_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request: text, or token ids, and how many tokens it must produce."""

    prompt: str | list[int]
    output_tokens: int


@dataclass(slots=True)
class Reply:
    """What came back: times in seconds of the performance counter, counts from `usage`."""

    sent_s: float = 0.0
    text_at_s: list[float] = field(default_factory=list[float])
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


def random_ids(generator: random.Random, length: int, vocab_tokens: int) -> list[int]:
    """Token ids drawn evenly from the vocabulary, without its first ones."""
    low = min(FIRST_RANDOM_ID, vocab_tokens - 1)
    return [generator.randrange(low, vocab_tokens) for _ in range(length)]


def text_prompts(path: Path, count: int, generator: random.Random) -> list[str]:
    """`count` prompts of a file: its lines, or the `prompt` of each line of JSON; drawn with repetition.

    Raises:
        OptionError: the file cannot be read or holds no prompt.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise OptionError(
            f"--dataset-path is {path}, which cannot be read: {error.strerror}"
        ) from error
    if not lines:
        raise OptionError(f"--dataset-path is {path}, which holds no prompt")
    if path.suffix == ".jsonl":
        lines = [str(json.loads(line)["prompt"]) for line in lines]
    return [generator.choice(lines) for _ in range(count)]


async def run_open_loop(
    server: Server,
    endpoint: str,
    work: Sequence[Work],
    *,
    model: str | None,
    request_rate: float,
    burstiness: float,
    max_concurrency: int | None,
    generator: random.Random,
) -> tuple[str, list[Reply], float]:
    """Send all work and wait for every answer.

    Returns:
        The model's name, a reply per request in order, and the seconds from first arrival to last answer.

    Raises:
        EngineError: the server does not answer at all.
    """
    name = model or await _first_model(server)
    gate = asyncio.Semaphore(max_concurrency or len(work))

    async def send(each: Work) -> Reply:
        async with gate:
            return await _ask(server, endpoint, name, each)

    began_s = time.perf_counter()
    due_s = began_s
    tasks: list[asyncio.Task[Reply]] = []
    for each in work:
        if request_rate != float("inf") and tasks:
            due_s += generator.gammavariate(burstiness, 1.0 / (request_rate * burstiness))
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(send(each)))
    replies = await asyncio.gather(*tasks)
    return name, replies, time.perf_counter() - began_s


async def _ask(server: Server, endpoint: str, model: str, work: Work) -> Reply:
    """One request; a failure is written into the reply."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": work.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint.endswith("/chat/completions"):
        body["messages"] = [{"role": "user", "content": work.prompt}]
    else:
        body["prompt"] = work.prompt
    reply = Reply(sent_s=time.perf_counter())
    try:
        async for line in _lines(server, "POST", endpoint, json.dumps(body).encode()):
            if line.startswith(b"data: {"):
                _take(reply, _decoder.decode(line[6:]))
    except (OSError, EngineError, EOFError, ValueError, IndexError) as error:
        reply.error = str(error) or type(error).__name__
    reply.ended_s = reply.text_at_s[-1] if reply.text_at_s else time.perf_counter()
    if reply.error is None and not reply.text_at_s:
        reply.error = "the answer had no text"
    return reply


def _take(reply: Reply, chunk: _Chunk) -> None:
    if chunk.error is not None:
        raise EngineError(f"the stream ended with {chunk.error}")
    if chunk.usage is not None:
        reply.prompt_tokens = chunk.usage.prompt_tokens
        reply.output_tokens = chunk.usage.completion_tokens
    if any(choice.text or (choice.delta and choice.delta.content) for choice in chunk.choices):
        reply.text_at_s.append(time.perf_counter())


async def _first_model(server: Server) -> str:
    try:
        lines = [line async for line in _lines(server, "GET", "/v1/models", b"")]
    except OSError as error:
        raise EngineError(
            f"no server answers at {server.uds or f'{server.host}:{server.port}'}: {error}",
            hint="start one with `tokamak serve`",
        ) from error
    return str(json.loads(b"".join(lines))["data"][0]["id"])


async def _lines(server: Server, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
    """The lines of a 200 answer's body, as they come.

    Raises:
        EngineError: the status is not 200; the message has it and the beginning of the body.
    """
    if server.uds is not None:
        reader, writer = await asyncio.open_unix_connection(server.uds, limit=READ_LIMIT_BYTES)
    else:
        reader, writer = await asyncio.open_connection(
            server.host, server.port, ssl=server.tls or None, limit=READ_LIMIT_BYTES
        )
    try:
        key = f"Authorization: Bearer {server.api_key}\r\n" if server.api_key else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {server.host}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(headers.split()[1])
        chunks = _chunks(reader) if b"transfer-encoding: chunked" in headers else _plain(reader)
        if status != 200:
            text = b"".join([part async for part in chunks]).decode(errors="replace")
            raise EngineError(f"HTTP {status}: {text[:300]}")
        rest = b""
        async for part in chunks:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield line
        if rest:
            yield rest
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _plain(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(65536):
        yield part
