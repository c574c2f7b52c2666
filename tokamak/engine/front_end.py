"""How do requests and the engine's updates find each other in the front end?

`FrontEnd` is an EngineClient without a transport: a subclass sends messages to an engine and hands in what comes
back, all on one event loop. It knows every sibling that runs, makes its text events where they are consumed, and
aborts what a client leaves behind. What waits for a slow client is bounded by the request's `max_tokens`.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace

from tokamak.core.generation import EngineInfo, GenerationEvent, GenerationRequest
from tokamak.core.request import FinishReason
from tokamak.engine.admission import LONG_TEXT_CHARACTERS, Admission
from tokamak.engine.client import EngineClient, EngineHealth
from tokamak.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineReport,
    EngineStats,
    RequestUpdate,
    ResetPrefixCache,
    StepUpdates,
    ToEngine,
)
from tokamak.engine.outputs import OutputStream
from tokamak.errors import EngineDeadError, OverloadedError
from tokamak.text.chat_format import ChatFormat
from tokamak.text.tokenizer import Tokenizer

DRAIN_RETRY_S = 5.0
"""When a client refused by a draining engine may try its successor."""


class FrontEnd(EngineClient):
    """The part of an engine client that does not care where the engine runs."""

    def __init__(
        self, info: EngineInfo, tokenizer: Tokenizer, chat_template: ChatFormat | None
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._admission = Admission(tokenizer, info.vocab_tokens, info.max_model_len)
        self._inboxes: dict[str, _Inbox] = {}
        """Of every engine request that is not finished."""
        self._generations = 0
        """Client requests that are being admitted or run."""
        self._serial = 0
        """Makes engine ids unique: a client may use its id again while old news is under way."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._stats = EngineStats(free_blocks=info.total_blocks, total_blocks=info.total_blocks)
        self._report = EngineReport()
        self._draining = False
        self._failure: str | None = None
        self._heard_s = self._token_s = time.monotonic()

    @abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Hand a message to the engine without blocking."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """See EngineClient."""
        arrived_s = time.monotonic()
        self._refuse_when_down()
        self._generations += 1
        self._serial += 1
        self._idle.clear()
        request = replace(request, request_id=f"{request.request_id}-{self._serial}")
        inbox = _Inbox()
        streams: dict[str, OutputStream] = {}
        try:
            adds = await self._admit(request)
            self._refuse_when_down()
            for add in adds:
                streams[add.request_id] = OutputStream(
                    self.tokenizer,
                    add.params,
                    add.prompt_ids,
                    sibling=add.sibling,
                    arrived_s=arrived_s,
                )
            self._register(adds, inbox)
            left = len(streams)
            while left:
                update = await inbox.get()
                stream = streams[update.request_id]
                event = stream.feed(update, time.monotonic())
                if stream.ended_here:
                    self._forget([update.request_id], abort=True)
                if stream.finished:
                    left -= 1
                if event is not None:
                    yield event
        finally:
            self._forget(streams, abort=True)
            self._generations -= 1
            if not self._generations:
                self._idle.set()

    def health(self) -> EngineHealth:
        """See EngineClient."""
        now = time.monotonic()
        return EngineHealth(
            alive=self._failure is None,
            loaded=self._failure is None,
            draining=self._draining,
            loop_age_s=now - self._heard_s,
            unfinished_requests=len(self._inboxes),
            token_age_s=now - self._token_s if self._inboxes else None,
            failure=self._failure,
        )

    def stats(self) -> EngineStats:
        """See EngineClient."""
        return self._stats

    def report(self) -> EngineReport:
        """See EngineClient."""
        return self._report

    async def reset_prefix_cache(self) -> None:
        """See EngineClient."""
        self._refuse_when_dead()
        self._send(ResetPrefixCache())

    async def drain(self, timeout_s: float) -> bool:
        """See EngineClient."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _receive(self, message: StepUpdates) -> None:
        """Hand in the news of a step; updates of requests that nobody waits for are dropped."""
        self._heard_s = time.monotonic()
        self._stats = message.stats
        self._report = message.report or self._report
        for update in message.updates:
            inbox = self._inboxes.get(update.request_id)
            if inbox is None:
                continue
            if update.token_ids:
                self._token_s = self._heard_s
            if update.finish_reason is not None:
                del self._inboxes[update.request_id]
            inbox.put(update)

    def _fail(self, message: str) -> None:
        """The engine is gone: every request ends with EngineDeadError, and none comes in."""
        if self._failure is not None:
            return
        self._failure = message
        for inbox in set(self._inboxes.values()):
            inbox.close(message)
        self._inboxes.clear()

    def _abort_all(self) -> None:
        """End every unfinished request with finish reason `abort`."""
        ids = list(self._inboxes)
        for request_id in ids:
            update = RequestUpdate(request_id=request_id, finish_reason=FinishReason.ABORT)
            self._inboxes[request_id].put(update)
        self._forget(ids, abort=True)

    async def _admit(self, request: GenerationRequest) -> list[AddRequest]:
        if isinstance(request.prompt, str) and len(request.prompt) > LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(self._admission.admit, request)
        return self._admission.admit(request)

    def _register(self, adds: list[AddRequest], inbox: _Inbox) -> None:
        if not self._inboxes:
            self._token_s = time.monotonic()
        for add in adds:
            self._inboxes[add.request_id] = inbox
            self._send(add)

    def _forget(self, request_ids: list[str] | dict[str, OutputStream], *, abort: bool) -> None:
        """Stop listening for these; the engine is told of those it has not ended itself."""
        unfinished = [name for name in request_ids if self._inboxes.pop(name, None) is not None]
        if unfinished and abort and self._failure is None:
            self._send(AbortRequests(request_ids=unfinished))

    def _refuse_when_down(self) -> None:
        self._refuse_when_dead()
        if self._draining:
            raise OverloadedError(
                "the engine is shutting down and takes no new requests",
                retry_after_s=DRAIN_RETRY_S,
            )

    def _refuse_when_dead(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure, hint="restart the server; its log has the reason")


class _Inbox:
    """Updates of one client request's siblings, in order, for one consumer."""

    def __init__(self) -> None:
        self._updates: deque[RequestUpdate] = deque()
        self._reader: asyncio.Future[None] | None = None
        """What the consumer waits for, while it waits."""
        self._failure: str | None = None

    def put(self, update: RequestUpdate) -> None:
        self._updates.append(update)
        self._wake()

    def close(self, failure: str) -> None:
        """The engine died; what has arrived may still be read."""
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> RequestUpdate:
        """The next update, joined with those of the same sibling that wait behind it.

        So a consumer that falls behind gets more tokens at a time, and catches up.
        """
        updates = self._updates
        while not updates:
            if self._failure is not None:
                raise EngineDeadError(self._failure)
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        first = updates.popleft()
        if not updates or not _may_join(first, updates[0]):
            return first
        joined = [first, updates.popleft()]
        while updates and _may_join(joined[-1], updates[0]):
            joined.append(updates.popleft())
        return _joined(joined)


def _may_join(earlier: RequestUpdate, later: RequestUpdate) -> bool:
    """Whether two updates may reach a client as one: an error comes after what was generated before it."""
    return (
        later.request_id == earlier.request_id
        and later.finish_reason is not FinishReason.ERROR
        and earlier.finish_reason is None
    )


def _joined(updates: list[RequestUpdate]) -> RequestUpdate:
    """The news of a sibling's successive updates in one; only the last may end it."""
    last = updates[-1]
    return RequestUpdate(
        request_id=last.request_id,
        token_ids=[token_id for update in updates for token_id in update.token_ids],
        logprobs=[entry for update in updates for entry in update.logprobs],
        prompt_logprobs=[entry for update in updates for entry in update.prompt_logprobs],
        finish_reason=last.finish_reason,
        stop_id=last.stop_id,
        cached_tokens=max(update.cached_tokens for update in updates),
    )
