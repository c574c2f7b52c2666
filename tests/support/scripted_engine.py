"""How does a client behave, given an engine whose every token is known?

`ScriptedCore` has EngineCore's face and no model: a script names each next token. `ScriptedEngine` runs one on the
event loop behind the real front end, so requests are admitted, cut, streamed and aborted as in production. Both
record what they were told.

    engine = ScriptedEngine(script=says("Hello there."))
    async with engine:
        events = [event async for event in engine.generate(request)]
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tokamak.core.generation import EngineInfo
from tokamak.core.request import FinishReason
from tokamak.engine.front_end import FrontEnd
from tokamak.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineReport,
    EngineStats,
    PositionLogprobs,
    Ready,
    RequestUpdate,
    ResetPrefixCache,
    Shutdown,
    StepUpdates,
    ToEngine,
)
from tokamak.text.chat_format import ChatFormat
from tokamak.text.chat_template import ChatTemplate
from tokamak.text.tokenizer import Tokenizer, byte_alphabet

BOS_ID, EOS_ID, START_ID, END_ID = 256, 257, 258, 259
"""Special tokens after the 256 bytes: `<bos>`, `<eos>`, `<|start|>`, `<|end|>`."""

SPECIAL_TOKENS = ("<bos>", "<eos>", "<|start|>", "<|end|>")

VOCAB_TOKENS = 260

BLOCK_TOKENS = 16

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('role ' ~ message.role ~ ' is unknown') }}{% endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

Script = Callable[[AddRequest, int], int]
"""The token id at an output position, as a function of the request and the position."""


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose id of a byte is its value, with the special tokens above."""
    vocabulary = {name: byte for byte, name in enumerate(byte_alphabet())}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    return Tokenizer(backend, bos_id=BOS_ID, eos_ids=frozenset({EOS_ID}), vocab_tokens=VOCAB_TOKENS)


def chat_template(source: str = CHAT_TEMPLATE) -> ChatTemplate:
    """The scripted model's chat template."""
    return ChatTemplate(source, bos_token="<bos>", eos_token="<eos>")


def echoes(request: AddRequest, position: int) -> int:
    """Repeat the prompt, then end; siblings of a sampled request start at different places."""
    at = position if request.params.greedy else position + request.sibling
    return request.prompt_ids[at] if at < len(request.prompt_ids) else EOS_ID


def counts(request: AddRequest, position: int) -> int:
    """Letters a, b, c, … for ever, from a place that depends on the prompt (and sampled sibling)."""
    start = sum(request.prompt_ids) + (0 if request.params.greedy else request.sibling)
    return ord("a") + (start + position) % 26


def says(text: str) -> Script:
    """Say this text, then end."""
    ids = text.encode()
    return lambda request, position: ids[position] if position < len(ids) else EOS_ID


@dataclass(slots=True)
class _Running:
    add: AddRequest
    generated: int = 0
    prefilled: bool = False


@dataclass
class ScriptedCore:
    """EngineCore's face over a script. Each step gives every running request `step_tokens` tokens."""

    script: Script = counts
    step_tokens: int = 1
    max_model_len: int = 4096
    max_running: int = 64
    max_waiting: int = 1_000
    total_blocks: int = 10_000
    step_s: float = 0.0
    """How long a step sleeps."""
    fail_step: int | None = None
    """The step that raises `failure`."""
    failure: Exception = field(default_factory=lambda: RuntimeError("the script failed"))
    fail_requests: dict[int, RequestUpdate] = field(default_factory=dict)
    """By first prompt id: an update that ends such a request (its request_id is filled in)."""
    added: list[AddRequest] = field(default_factory=list)
    """Every request ever added."""
    aborted: list[str] = field(default_factory=list)
    """Ids of unfinished requests that were aborted."""
    unknown_aborts: list[str] = field(default_factory=list)
    """Ids of aborts that came for no unfinished request."""
    told: EngineReport = field(default_factory=EngineReport)
    """What `report` says."""
    resets: int = 0
    pieces_left: int = 0
    steps: int = 0
    closed: bool = False
    _running: dict[str, _Running] = field(default_factory=dict)
    _waiting: dict[str, _Running] = field(default_factory=dict)
    _news: list[RequestUpdate] = field(default_factory=list)
    _totals: dict[str, int] = field(default_factory=lambda: {"tokens": 0, "prompt": 0, "done": 0})
    _token_s: float = 0.0

    def ready(self) -> Ready:
        return Ready(
            max_model_len=self.max_model_len,
            vocab_tokens=VOCAB_TOKENS,
            block_tokens=BLOCK_TOKENS,
            total_blocks=self.total_blocks,
            choices=[("script", "scripted", "no model is run")],
            load_s={"script": 0.0},
        )

    def add(self, request: AddRequest) -> None:
        self.added.append(request)
        if len(self._waiting) >= self.max_waiting:
            self._news.append(
                RequestUpdate(
                    request_id=request.request_id,
                    finish_reason=FinishReason.ERROR,
                    error=f"the queue holds {self.max_waiting} requests and is full",
                    error_kind="overloaded",
                    retry_after_s=1.0,
                )
            )
            return
        self._waiting[request.request_id] = _Running(request)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            known = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
            (self.unknown_aborts if known is None else self.aborted).append(request_id)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._news)

    def work_ahead(self) -> bool:
        self.pieces_left = max(self.pieces_left - 1, 0)
        return self.pieces_left > 0

    def step(self) -> list[RequestUpdate]:
        if self.step_s:
            time.sleep(self.step_s)
        self.steps += 1
        if self.fail_step is not None and self.steps >= self.fail_step:
            raise self.failure
        while self._waiting and len(self._running) < self.max_running:
            request_id, entry = next(iter(self._waiting.items()))
            del self._waiting[request_id]
            self._running[request_id] = entry
        updates, self._news = self._news, []
        for entry in list(self._running.values()):
            update = self._advance(entry)
            updates.append(update)
            if update.finish_reason is not None:
                del self._running[update.request_id]
                self._totals["done"] += 1
        return updates

    def stats(self) -> EngineStats:
        used = sum(
            math.ceil((len(entry.add.prompt_ids) + entry.generated) / BLOCK_TOKENS)
            for entry in self._running.values()
        )
        return EngineStats(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            waiting_tokens=sum(len(entry.add.prompt_ids) for entry in self._waiting.values()),
            free_blocks=self.total_blocks - used,
            total_blocks=self.total_blocks,
            steps=self.steps,
            scheduled_tokens=self._totals["prompt"] + self._totals["tokens"],
            running_tokens=self._totals["prompt"] + self._totals["tokens"],
            generated_tokens=self._totals["tokens"],
            prompt_tokens=self._totals["prompt"],
            host_waits=self.steps,
            finished_requests=self._totals["done"],
            last_token_monotonic_s=self._token_s,
        )

    def report(self) -> EngineReport:
        return self.told

    def close(self) -> None:
        self.closed = True

    def _advance(self, entry: _Running) -> RequestUpdate:
        add = entry.add
        failing = self.fail_requests.get(add.prompt_ids[0])
        if failing is not None:
            return RequestUpdate(
                request_id=add.request_id,
                finish_reason=FinishReason.ERROR,
                error=failing.error,
                error_kind=failing.error_kind,
                error_field=failing.error_field,
                retry_after_s=failing.retry_after_s,
            )
        prompt_logprobs: list[PositionLogprobs] = []
        if not entry.prefilled:
            entry.prefilled = True
            self._totals["prompt"] += len(add.prompt_ids)
            if add.params.prompt_logprobs is not None:
                asked = add.params.prompt_logprobs
                prompt_logprobs = [scripted_logprobs(i, asked) for i in add.prompt_ids[1:]]
        token_ids: list[int] = []
        reason: FinishReason | None = FinishReason.LENGTH if add.max_tokens == 0 else None
        stop_id: int | None = None
        while reason is None and len(token_ids) < self.step_tokens:
            token_id = self.script(add, entry.generated)
            may_stop = entry.generated >= add.params.min_tokens
            if token_id in add.stop_ids and not may_stop:
                token_id = ord("~")
            token_ids.append(token_id)
            entry.generated += 1
            if token_id in add.stop_ids:
                reason, stop_id = FinishReason.STOP, token_id
            elif entry.generated == add.max_tokens:
                reason = FinishReason.LENGTH
        self._totals["tokens"] += len(token_ids)
        self._token_s = time.monotonic()
        asked_logprobs = add.params.logprobs
        return RequestUpdate(
            request_id=add.request_id,
            token_ids=token_ids,
            logprobs=(
                []
                if asked_logprobs is None
                else [scripted_logprobs(token_id, asked_logprobs) for token_id in token_ids]
            ),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_id=stop_id,
        )


def scripted_logprobs(token_id: int, alternatives: int) -> PositionLogprobs:
    """The token has probability 1/2, the ids after it 1/4, 1/8, …"""
    ranked = [(token_id + at) % VOCAB_TOKENS for at in range(alternatives)]
    return PositionLogprobs(
        token_ids=[token_id, *ranked],
        logprobs=[-math.log(2), *(-(at + 1) * math.log(2) for at in range(alternatives))],
        rank=1,
    )


class ScriptedEngine(FrontEnd):
    """The real front end over a ScriptedCore on the same event loop; `async with` starts and closes it.

    `core` shows what the engine was told: `core.added`, `core.aborted`, `core.unknown_aborts`. `token_s` is the
    time between two steps. `die` fails it as a killed engine process would.
    """

    def __init__(
        self,
        script: Script = counts,
        *,
        token_s: float = 0.0,
        served_names: tuple[str, ...] = ("scripted",),
        template: ChatFormat | None = None,
        core: ScriptedCore | None = None,
    ) -> None:
        self.core = ScriptedCore(script=script) if core is None else core
        ready = self.core.ready()
        info = EngineInfo(
            served_names=served_names,
            max_model_len=ready.max_model_len,
            vocab_tokens=ready.vocab_tokens,
            block_tokens=ready.block_tokens,
            total_blocks=ready.total_blocks,
            max_num_seqs=self.core.max_running,
            started_unix_s=time.time(),
            choices=tuple(ready.choices),
            load_s=ready.load_s,
        )
        super().__init__(info, byte_tokenizer(), chat_template() if template is None else template)
        self._stats = self.core.stats()
        self.token_s = token_s
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to step, on the running event loop; a first request does it too."""
        if self._loop_task is None:
            self._loop_task = asyncio.get_running_loop().create_task(self._run())

    def die(self, message: str = "the engine process ended with exit code -9") -> None:
        """Fail as when the engine process is killed."""
        if self._loop_task is not None:
            self._loop_task.cancel()
        self._fail(message)

    async def close(self) -> None:
        """See EngineClient."""
        self._abort_all()
        self._draining = True
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        self.core.close()

    def _send(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self.core.add(message)
            case AbortRequests():
                self.core.abort(message.request_ids)
            case ResetPrefixCache():
                self.core.reset_prefix_cache()
            case Shutdown():
                self.core.close()
        self.start()
        self._wake.set()

    def _news(self, updates: list[RequestUpdate]) -> StepUpdates:
        return StepUpdates(updates=updates, stats=self.core.stats(), report=self.core.report())

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            if self.core.has_work:
                try:
                    updates = self.core.step()
                except Exception as error:
                    self._fail(f"the engine failed: {type(error).__name__}: {error}")
                    return
                self._receive(self._news(updates))
                await asyncio.sleep(self.token_s)
                continue
            self._receive(self._news([]))
            try:
                async with asyncio.timeout(0.1):
                    await self._wake.wait()
            except TimeoutError:
                continue
