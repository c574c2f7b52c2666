"""What does an engine process do, from its first line to its exit code?

It reads its start order from standard input, ties its life to the front end's, builds an EngineCore and turns its
loop: messages in, a step, news out. Without work it does what can wait for such a moment, then sleeps until a message
comes, and says every half second that it is alive. Exit codes: 0 asked to end, 1 failed (the front end was told why), 3 the front end is gone.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import msgspec

from tokamak.config.engine import EngineConfig
from tokamak.core.request import FinishReason
from tokamak.engine.core_face import CoreFace
from tokamak.engine.messages import (
    AbortRequests,
    AddRequest,
    Failed,
    FromEngine,
    RequestUpdate,
    ResetPrefixCache,
    Shutdown,
    StepUpdates,
    ToEngine,
)
from tokamak.engine.transport import Channel, StartEngine, engine_channel
from tokamak.errors import FatalError, TokamakError

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5

REPORT_S = 0.5
"""Between two reports: longer than a step, as putting one together takes about as long as a small one."""

EXIT_ENDED, EXIT_FAILED, EXIT_ORPHANED = 0, 1, 3

_PR_SET_PDEATHSIG = 1
"""Linux' prctl option: a signal when the parent ends."""


class EngineLoop:
    """Turns a core: takes messages, steps while there is work, tells the front end."""

    def __init__(self, core: CoreFace, channel: Channel[ToEngine, FromEngine]) -> None:
        self.ending = False
        """Set to end after the current turn; unfinished requests end with `abort`."""
        self._core = core
        self._channel = channel
        self._unfinished: set[str] = set()
        self._settled = False
        self._spoke_s = 0.0
        self._reported_s = float("-inf")

    def run(self) -> None:
        """Serve until told to end."""
        while not self.ending:
            self._take_messages()
            if self._core.has_work:
                self._tell(self._core.step())
            else:
                self._tell([])
                if not self._core.work_ahead():
                    self._settle()
                    self._channel.wait(HEARTBEAT_S)
        self._tell(
            [
                RequestUpdate(request_id=request_id, finish_reason=FinishReason.ABORT)
                for request_id in self._unfinished
            ]
        )

    def _settle(self) -> None:
        """The first time that nothing is left to do, what was made since the start stays, too."""
        if not self._settled:
            self._settled = True
            _settle_garbage()

    def _take_messages(self) -> None:
        for message in self._channel.receive():
            match message:
                case AddRequest():
                    self._unfinished.add(message.request_id)
                    self._core.add(message)
                case AbortRequests():
                    self._unfinished.difference_update(message.request_ids)
                    self._core.abort(message.request_ids)
                case ResetPrefixCache():
                    self._core.reset_prefix_cache()
                case Shutdown():
                    self.ending = True

    def _tell(self, updates: list[RequestUpdate]) -> None:
        """Send news at once, and a sign of life when the last word is a heartbeat ago."""
        now = time.monotonic()
        if not updates and now - self._spoke_s < HEARTBEAT_S:
            return
        self._unfinished.difference_update(
            update.request_id for update in updates if update.finish_reason is not None
        )
        report = None
        if now - self._reported_s >= REPORT_S:
            report, self._reported_s = self._core.report(), now
        self._channel.send(StepUpdates(updates=updates, stats=self._core.stats(), report=report))
        self._spoke_s = now


def serve(start: StartEngine, build: Callable[[EngineConfig], CoreFace]) -> int:
    """Build a core, serve with it, and return the exit code."""
    channel = engine_channel(start.endpoint)
    core: CoreFace | None = None
    try:
        core = build(start.config)
        loop = EngineLoop(core, channel)
        _end_on_sigterm(loop)
        _settle_garbage()
        channel.send(core.ready())
        loop.run()
    except Exception as error:
        if isinstance(error, FatalError):
            logger.critical("the engine ends: %s: %s", type(error).__name__, _one_line(error))
        elif not isinstance(error, TokamakError):
            logger.exception("the engine failed")
        channel.send(Failed(message=_one_line(error), kind=type(error).__name__))
        return EXIT_FAILED
    finally:
        if core is not None:
            core.close()
        channel.close()
    return EXIT_ENDED


def run(build: Callable[[EngineConfig], CoreFace]) -> int:
    """The whole process: read the order, tie to the parent, serve. Returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="engine: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = _read_start()
    _tie_to_parent(start)
    return serve(start, build)


def _read_start() -> StartEngine:
    """The order: a length of 8 bytes, then msgpack. The pipe stays open while the parent lives."""
    length = int.from_bytes(_read_exactly(8), "big")
    return msgspec.msgpack.decode(_read_exactly(length), type=StartEngine)


def _read_exactly(length: int) -> bytes:
    parts: list[bytes] = []
    while length:
        part = os.read(0, length)
        if not part:
            sys.exit(EXIT_ORPHANED)
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _tie_to_parent(start: StartEngine) -> None:
    """End when the parent does: its pipe closes, and on Linux the system kills us as well.

    The system's kill comes when the *thread* that started us ends, so it is only asked for if that is the
    parent's main thread.
    """
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_exit_at_end_of, args=(pipe,), name="parent-watch", daemon=True).start()
    if start.dies_with_parent and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != start.parent_id:
            os._exit(EXIT_ORPHANED)


def _exit_at_end_of(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os._exit(EXIT_ORPHANED)


def _end_on_sigterm(loop: EngineLoop) -> None:
    def end(number: int, frame: FrameType | None) -> None:
        loop.ending = True

    signal.signal(signal.SIGTERM, end)


def _settle_garbage() -> None:
    """What is loaded and recorded stays: keep the collector from walking it again and again while serving."""
    gc.collect()
    gc.freeze()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, TokamakError) else f"{type(error).__name__}: {text}"
