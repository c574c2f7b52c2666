"""The front end's face of an engine: text and messages in, events with text out.

`EngineClient` is what the server and the CLI know. Its implementations live in `process_client.py` (an
engine process behind sockets) and, for tests, in `tests/support/scripted_engine.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tokamak.core.generation import EngineInfo, GenerationEvent, GenerationRequest
from tokamak.engine.messages import EngineReport, EngineStats
from tokamak.text.chat_format import ChatFormat
from tokamak.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """How the engine is, as far as its last message tells."""

    alive: bool
    """The process exists and did not report a failure."""
    loaded: bool
    draining: bool
    loop_age_s: float
    """Seconds since the engine's loop last spoke."""
    unfinished_requests: int
    token_age_s: float | None
    """Seconds since the last token while unfinished requests exist; None when there is no work."""
    failure: str | None


class EngineClient(ABC):
    """An engine that serves one model."""

    info: EngineInfo
    tokenizer: Tokenizer
    chat_template: ChatFormat | None

    @abstractmethod
    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Run a request; closing the iterator aborts every sibling that is not finished.

        Events of the `params.n` siblings interleave; each sibling ends with one event that has a finish
        reason. Everything wrong with the request is raised by the first `anext`.

        Raises:
            RequestError: the request is wrong, or its prompt and output do not fit.
            OverloadedError: the waiting queue is full, or the engine is draining.
            EngineError: the engine failed while running it.
        """

    @abstractmethod
    def health(self) -> EngineHealth:
        """How the engine is now; reads no socket and never blocks."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """The engine's last gauges and counters."""

    @abstractmethod
    def report(self) -> EngineReport:
        """Where the engine's steps went and what its graphs are, at most a second old."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget reusable prefixes that no request holds."""

    @abstractmethod
    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; True when all ended in time."""

    @abstractmethod
    async def close(self) -> None:
        """End the engine; unfinished requests end with `abort`."""
