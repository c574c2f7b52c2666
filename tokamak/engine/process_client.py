"""How does a front end use an engine that runs in a process of its own?

`start_engine` starts the process, reads the tokenizer while the model loads, and returns a `ProcessClient` that serves
on the running event loop. Messages are read where the loop is told that the socket has news: one wake-up a step,
however many requests run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tokamak.config.engine import EngineConfig, ModelConfig
from tokamak.core.generation import EngineInfo
from tokamak.engine.configure import engine_info, load_text
from tokamak.engine.front_end import FrontEnd
from tokamak.engine.launch import ENGINE_MODULE, EngineProcess
from tokamak.engine.messages import Failed, Ready, StepUpdates, ToEngine
from tokamak.text.chat_format import ChatFormat
from tokamak.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LAST_WORDS_S = 0.1
"""After the process ended: time for its last message, which says why, to come through."""


class ProcessClient(FrontEnd):
    """An engine process as an EngineClient. Made by `start_engine`, used on the loop it was made on."""

    def __init__(
        self,
        process: EngineProcess,
        info: EngineInfo,
        tokenizer: Tokenizer,
        chat_template: ChatFormat | None,
    ) -> None:
        super().__init__(info, tokenizer, chat_template)
        self._process = process
        self._channel = process.channel
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._file_number = self._channel.file_number
        self._loop.add_reader(self._file_number, self._read)
        self._loop.call_soon(self._read)
        process.when_ended(self._tell_ended)

    @property
    def process_id(self) -> int:
        """The engine's process id."""
        return self._process.process_id

    async def close(self) -> None:
        """See EngineClient."""
        if self._closing:
            return
        self._closing = True
        self._draining = True
        self._abort_all()
        self._loop.remove_reader(self._file_number)
        await self._process.stop()
        self._fail("the engine was closed")

    def _send(self, message: ToEngine) -> None:
        if not self._channel.send(message):
            self._fail("the engine process does not take messages any more")
            return
        if self._channel.has_news:
            # Sending may use up the socket's wake-up; without this its news would wait for the next one.
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        if self._closing:
            return
        for message in self._channel.receive():
            match message:
                case StepUpdates():
                    self._receive(message)
                case Failed():
                    self._fail(f"the engine failed: {message.message}")
                case Ready():
                    pass  # Only the first message, which the start has read.

    def _tell_ended(self) -> None:
        """The process ended. Runs on the watching thread."""
        try:
            self._loop.call_soon_threadsafe(self._loop.call_later, LAST_WORDS_S, self._ended)
        except RuntimeError:
            logger.debug("the event loop closed before the engine process ended")

    def _ended(self) -> None:
        if self._closing:
            return
        self._read()
        self._fail(self._process.ending())
        self._loop.remove_reader(self._file_number)


async def start_engine(
    config: EngineConfig,
    *,
    process: EngineProcess | None = None,
    module: str = ENGINE_MODULE,
    load: Callable[[ModelConfig], tuple[Tokenizer, ChatFormat | None]] = load_text,
) -> ProcessClient:
    """Start an engine process and wait until it serves.

    Args:
        config: what to load.
        process: one that was started with this config, or None to start it now.
        module: the engine process' module, run with `python -m`.
        load: reads the tokenizer and chat template, on another thread, while the model loads.

    Raises:
        OptionError, ModelError, NoBackendError: what the engine found wrong while it loaded.
        EngineError: it failed for another reason; its output has more.
    """
    process = process or EngineProcess(config, module=module)
    try:
        tokenizer, template = await asyncio.to_thread(load, config.model)
        ready = await process.wait_ready()
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in ready.load_s.items())
        logger.info("the engine loaded; seconds: %s", parts)
    except BaseException:
        process.kill()
        raise
    return ProcessClient(process, engine_info(config, ready), tokenizer, template)
