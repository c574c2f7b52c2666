"""How do the routes run generations for one HTTP request?

In: engine requests, one per prompt. Out: events of all of them as they come, measured, and closed together: when
the caller stops listening, every sibling of every prompt that is not finished is aborted. What the client sees of
them is the routes' affair.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import cast

from starlette.types import Receive

from tokamak.core.generation import (
    GenerationEvent,
    GenerationRequest,
    TokenLogprob,
    Usage,
)
from tokamak.core.request import FinishReason, StructuredOutput
from tokamak.engine.client import EngineClient
from tokamak.errors import GrammarError, OverloadedError, RequestError
from tokamak.sampling.grammar import check_structured
from tokamak.server.disconnect import unless_gone
from tokamak.server.errors import AbortedError
from tokamak.server.protocol.answers import UsageBody, usage_body
from tokamak.telemetry.metrics import Metrics

GRAMMAR_SECONDS = 1.0
"""How long a client's grammar may take to compile."""

PromptEvent = tuple[int, GenerationEvent]
"""News of one sibling, with the index of its prompt."""

_compilers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")


def new_id(kind: str) -> str:
    """A fresh id for a response, such as `chatcmpl-3f…`; clients' own request ids may repeat."""
    return f"{kind}-{uuid.uuid4().hex}"


async def check_constraint(structured: StructuredOutput | None, field_name: str) -> None:
    """Refuse a constraint that does not compile, before the engine hears of it."""
    if structured is None:
        return
    compiling = asyncio.get_running_loop().run_in_executor(
        _compilers, lambda: check_structured(structured, field=field_name)
    )
    try:
        await asyncio.wait_for(compiling, GRAMMAR_SECONDS)
    except TimeoutError as error:
        raise GrammarError(
            f"the {structured.kind} takes longer than {GRAMMAR_SECONDS:g} s to compile",
            field=field_name,
            hint="make it smaller",
        ) from error


@contextmanager
def client_names(names: Mapping[str, str]) -> Generator[None]:
    """Errors raised inside name fields as the client wrote them: `names` maps the engine's words to its."""
    try:
        yield
    except RequestError as error:
        name = names.get(error.field or "")
        if name is None:
            raise
        error.message = re.sub(rf"\b{error.field}\b", name, error.message)
        if error.hint is not None:
            error.hint = re.sub(rf"\b{error.field}\b", name, error.hint)
        error.field = name
        raise


async def run(
    client: EngineClient, requests: Sequence[GenerationRequest], metrics: Metrics
) -> AsyncGenerator[PromptEvent]:
    """Events of all requests, interleaved as they come.

    Raises:
        RequestError, OverloadedError, EngineError: from the engine; the other requests end with it.
        AbortedError: the engine is shutting down and gave a generation up.
    """
    watch = _Watch(metrics, sum(request.params.n for request in requests))
    # The contract's iterator is closed to abort it, so it is a generator.
    streams = [cast("AsyncGenerator[GenerationEvent]", client.generate(r)) for r in requests]
    try:
        async with aclosing(_merged(streams)) as events:
            async for at, event in events:
                watch.see(at, event)
                _refuse_aborted(event)
                yield at, event
    except (RequestError, OverloadedError):
        watch.end("refused")
        raise
    except Exception:
        watch.end("error")
        raise
    finally:
        watch.end("gone")


def _refuse_aborted(event: GenerationEvent) -> None:
    if event.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise AbortedError(
            "the engine stopped before the answer was complete", hint="send the request again"
        )


async def first_event(
    receive: Receive, events: AsyncGenerator[PromptEvent], names: Mapping[str, str]
) -> PromptEvent:
    """The first event; what is wrong with a request shows here, while a status can still be sent."""

    async def first() -> PromptEvent:
        return await anext(events)

    with client_names(names):
        return await unless_gone(receive, first())


async def _merged(streams: list[AsyncGenerator[GenerationEvent]]) -> AsyncGenerator[PromptEvent]:
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for event in only:
                yield 0, event
        return
    news: asyncio.Queue[PromptEvent | Exception | None] = asyncio.Queue()

    async def pump(at: int, stream: AsyncGenerator[GenerationEvent]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    news.put_nowait((at, event))
        except Exception as error:
            # Raised where the events are read.
            news.put_nowait(error)
        else:
            news.put_nowait(None)

    pumps = [asyncio.create_task(pump(at, stream)) for at, stream in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            item = await news.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)


class _Watch:
    """Measures the generations of one HTTP request."""

    def __init__(self, metrics: Metrics, generations: int) -> None:
        self._metrics = metrics
        self._open = generations
        self._last_s: dict[tuple[int, int], float] = {}

    def see(self, at: int, event: GenerationEvent) -> None:
        """Count an event's tokens, and the generation if it ended."""
        key = (at, event.sibling)
        tokens = len(event.token_ids)
        now_s = time.monotonic()
        before_s = self._last_s.get(key)
        if tokens:
            self._last_s[key] = now_s
            if before_s is not None:
                self._metrics.tokens_came(tokens, now_s - before_s)
        if event.finish_reason is None:
            return
        self._open -= 1
        self._metrics.generation_ended(event.finish_reason.value)
        times = event.timings
        first_s, last_s = times.first_token_s, times.last_token_s
        self._metrics.generation_done(
            prompt_tokens=event.usage.prompt_tokens,
            tokens=event.usage.completion_tokens,
            first_s=None if first_s is None else first_s - times.arrived_s,
            last_s=None if last_s is None else last_s - times.arrived_s,
        )

    def end(self, reason: str) -> None:
        """Count the generations that did not come to their end."""
        for _ in range(self._open):
            self._metrics.generation_ended(reason)
        self._open = 0


class UsageCount:
    """Adds up the usage of a request's generations."""

    def __init__(self) -> None:
        self._latest: dict[int, dict[int, Usage]] = {}

    def see(self, at: int, event: GenerationEvent) -> None:
        """Take note of an event's usage; each event has its sibling's total so far."""
        self._latest.setdefault(at, {})[event.sibling] = event.usage

    def body(self) -> UsageBody:
        """The usage so far: each prompt once, cached as far as its least cached sibling."""
        siblings = [list(prompt.values()) for prompt in self._latest.values()]
        prompts = [min(usages, key=lambda usage: usage.cached_tokens) for usages in siblings]
        completion_tokens = sum(u.completion_tokens for usages in siblings for u in usages)
        return usage_body(prompts, completion_tokens)


@dataclass(slots=True)
class Collected:
    """All events of one generation."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


async def collect(
    events: AsyncGenerator[PromptEvent], siblings: int, names: Mapping[str, str]
) -> tuple[list[Collected], UsageBody]:
    """Every generation whole, prompt by prompt and sibling by sibling, and their usage."""
    made: dict[int, Collected] = {}
    texts: dict[int, list[str]] = {}
    logprobs: dict[int, list[TokenLogprob]] = {}
    usage = UsageCount()
    with client_names(names):
        async with aclosing(events):
            async for at, event in events:
                usage.see(at, event)
                index = at * siblings + event.sibling
                one = made.setdefault(index, Collected())
                texts.setdefault(index, []).append(event.text)
                one.token_ids.extend(event.token_ids)
                if event.logprobs is not None:
                    logprobs.setdefault(index, []).extend(event.logprobs)
                one.prompt_ids = event.prompt_ids or one.prompt_ids
                one.prompt_logprobs = event.prompt_logprobs or one.prompt_logprobs
                if event.finish_reason is not None:
                    one.finish_reason = event.finish_reason
                    one.stop_reason = event.stop_reason
    for index, one in made.items():
        one.text = "".join(texts[index])
        if index in logprobs:
            one.logprobs = tuple(logprobs[index])
    return [made[index] for index in sorted(made)], usage.body()
