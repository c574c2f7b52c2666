"""How does a Python program generate text, offline and in its own process?

    with LLM("smollm2-135m") as llm:
        for output in llm.generate(["Once upon a time", "The sea"], SamplingParams(max_tokens=32)):
            print(output.text)

The engine runs inside the calls, so nothing happens between them. One thread uses an LLM.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, cast

from tokamak.config.options import DEFAULT_MODEL, EngineOptions
from tokamak.core.generation import EngineInfo, GenerationEvent, GenerationRequest
from tokamak.core.request import SamplingParams
from tokamak.engine.admission import Admission
from tokamak.engine.configure import configure, engine_info, load_text
from tokamak.engine.core import EngineCore
from tokamak.engine.core_face import CoreFace
from tokamak.engine.gathered import Gathered, RequestOutput
from tokamak.engine.interrupts import interrupted_after
from tokamak.engine.messages import AddRequest, EngineReport, EngineStats, RequestUpdate
from tokamak.engine.outputs import OutputStream
from tokamak.errors import EngineError, RequestError, TemplateError
from tokamak.sampling.grammar import check_structured
from tokamak.text.chat_format import ChatFormat
from tokamak.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages with `role` and `content`."""

WAITING_REQUESTS = 16
"""A long list of prompts is handed to the engine as its queue empties, so that it never overflows."""


class LLM:
    """A loaded model that continues prompts and answers messages."""

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        """Load a model.

        Args:
            model: a folder with config.json and safetensors, a .gguf file, a hub id, or `smollm2-135m`.
            options: fields of EngineOptions, such as `max_model_len`, `dtype` or `max_num_seqs`.

        Raises:
            OptionError: an option is unknown or cannot be met.
            ModelError: there is no such model, or it is incomplete or of a kind we do not implement.
        """
        config = configure(EngineOptions(model=model, **options), progress=sys.stderr.isatty())
        tokenizer, template = load_text(config.model)
        core = EngineCore(config)
        self._begin(core, tokenizer, template, engine_info(config, core.ready()))

    @classmethod
    def over(
        cls,
        core: CoreFace,
        tokenizer: Tokenizer,
        chat_template: ChatFormat | None,
        info: EngineInfo,
    ) -> Self:
        """An LLM over an engine core that is loaded already; closing it closes the core."""
        llm = cls.__new__(cls)
        llm._begin(core, tokenizer, chat_template, info)
        return llm

    def _begin(
        self,
        core: CoreFace,
        tokenizer: Tokenizer,
        chat_template: ChatFormat | None,
        info: EngineInfo,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.info = info
        self._core: CoreFace | None = core
        self._admission = Admission(tokenizer, info.vocab_tokens, info.max_model_len)
        self._inboxes: dict[str, deque[RequestUpdate]] = {}
        """Updates of every unfinished engine request, for the call that waits for them."""
        self._serial = 0

    # --- generation -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Continue one prompt or several, each text or token ids; outputs come in their order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all prompts, or one per prompt; the defaults of SamplingParams when left out.
            priority: lower runs first, under the `priority` policy.
            cache_salt: prefixes are shared only between calls with the same salt.

        Raises:
            RequestError: a prompt or its params are wrong; the message names its index and none runs.
            EngineError: a step failed; the unfinished ones of this call are aborted.
        """
        listed = _listed_prompts(prompts)
        each = _params_for(len(listed), params)
        requests = [
            self._request(prompt, params, True, priority, cache_salt)
            for prompt, params in zip(listed, each, strict=True)
        ]
        return self._run(requests)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the model's chat template.

        Args:
            messages: a list of messages, or a list of such lists.
            params: for all conversations, or one per conversation.
            tools: told to the model by the template.
            add_generation_prompt: end the prompt where the assistant begins to speak.
            variables: go to the template by name.

        Raises:
            TemplateError: the template refused the messages; the message names the conversation.
            RequestError, EngineError: see `generate`.
        """
        conversations = _listed_conversations(messages)
        each = _params_for(len(conversations), params)
        requests: list[GenerationRequest] = []
        for at, (conversation, own) in enumerate(zip(conversations, each, strict=True)):
            with _naming("messages", at, len(conversations)):
                prompt = self._rendered(conversation, tools, add_generation_prompt, variables)
            requests.append(self._request(prompt, own, False))
        return self._run(requests)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[GenerationEvent, None, None]:
        """Continue one prompt piece by piece; closing the iterator aborts what is unfinished.

        Raises:
            RequestError, EngineError: see `generate`; at the first `next`.
        """
        request = self._request(prompt, params or SamplingParams(), True)
        for _, event in self._events([request]):
            yield event

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> Generator[GenerationEvent, None, None]:
        """Answer one conversation piece by piece; closing the iterator aborts what is unfinished.

        Raises:
            TemplateError, RequestError, EngineError: see `chat`; at the first `next`.
        """
        prompt = self._rendered(messages, tools, add_generation_prompt, variables)
        request = self._request(prompt, params or SamplingParams(), False)
        for _, event in self._events([request]):
            yield event

    # --- the engine -----------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The engine's gauges and counters."""
        return self._open_core().stats()

    def report(self) -> EngineReport:
        """What is recorded, where steps went and how long their parts took; `/debug/graphs` has the same."""
        return self._open_core().report()

    def reset_prefix_cache(self) -> None:
        """Forget reusable prefixes that no request holds."""
        self._open_core().reset_prefix_cache()

    def close(self) -> None:
        """Free the model and its memory. May be called again."""
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------

    def _open_core(self) -> CoreFace:
        if self._core is None:
            raise EngineError("this LLM is closed", hint="make a new one")
        return self._core

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        add_special_tokens: bool,
        priority: int = 0,
        cache_salt: str = "",
    ) -> GenerationRequest:
        if params.structured is not None:
            check_structured(params.structured, field="structured")
        self._serial += 1
        return GenerationRequest(
            request_id=str(self._serial),
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            params=params,
            add_special_tokens=add_special_tokens,
            priority=priority,
            cache_salt=cache_salt,
        )

    def _rendered(
        self,
        messages: Conversation,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        if self.chat_template is None:
            raise TemplateError(
                f"the model {self.info.served_names[0]} has no chat template",
                field="messages",
                hint="give a file with one as chat_template, or use generate",
            )
        if not messages:
            raise RequestError("messages are empty; there is nothing to answer", field="messages")
        return self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )

    def _run(self, requests: list[GenerationRequest]) -> list[RequestOutput]:
        gathered = [Gathered(request) for request in requests]
        for at, event in self._events(requests):
            gathered[at].take(event)
        return [each.output() for each in gathered]

    def _events(self, requests: list[GenerationRequest]) -> Iterator[tuple[int, GenerationEvent]]:
        """Run requests to their end; yields (index of the request, event)."""
        core = self._open_core()
        arrived_s = time.monotonic()
        backlog: deque[tuple[int, AddRequest]] = deque()
        for at, request in enumerate(requests):
            with _naming("prompts", at, len(requests)):
                backlog.extend((at, add) for add in self._admission.admit(request))
        streams: dict[str, tuple[int, OutputStream]] = {}
        news: deque[RequestUpdate] = deque()
        try:
            while backlog or streams:
                with interrupted_after():
                    self._feed(core, backlog, streams, news, arrived_s)
                    if not news:
                        self._step(core)
                while news:
                    update = news.popleft()
                    at, stream = streams[update.request_id]
                    with _naming("prompts", at, len(requests)):
                        event = stream.feed(update, time.monotonic())
                    if stream.finished:
                        del streams[update.request_id]
                        self._forget(core, [update.request_id], abort=stream.ended_here)
                    if event is not None:
                        yield at, event
        finally:
            with interrupted_after():
                self._forget(core, list(streams), abort=True)

    def _feed(
        self,
        core: CoreFace,
        backlog: deque[tuple[int, AddRequest]],
        streams: dict[str, tuple[int, OutputStream]],
        news: deque[RequestUpdate],
        arrived_s: float,
    ) -> None:
        """Hand requests over while the engine's queue is short."""
        while backlog and core.stats().waiting_requests < WAITING_REQUESTS:
            at, add = backlog.popleft()
            stream = OutputStream(
                self.tokenizer,
                add.params,
                add.prompt_ids,
                sibling=add.sibling,
                arrived_s=arrived_s,
            )
            streams[add.request_id] = at, stream
            self._inboxes[add.request_id] = news
            core.add(add)

    def _step(self, core: CoreFace) -> None:
        """One turn of the engine; its updates go to the calls that wait for them."""
        for update in core.step():
            inbox = self._inboxes.get(update.request_id)
            if inbox is not None:
                inbox.append(update)

    def _forget(self, core: CoreFace, request_ids: list[str], *, abort: bool) -> None:
        for request_id in request_ids:
            self._inboxes.pop(request_id, None)
        if abort and request_ids and self._core is not None:
            core.abort(request_ids)


def _listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, also for a single text or a single list of ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(prompt, int) for prompt in prompts):
        return [cast("Sequence[int]", prompts)]
    listed = cast("Sequence[Prompt]", prompts)
    for at, prompt in enumerate(listed):
        if not isinstance(prompt, str | Sequence):
            raise RequestError(
                f"prompts[{at}] is {prompt!r}; a prompt is a text or a list of token ids",
                field="prompts",
            )
    return list(listed)


def _listed_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    if messages and isinstance(messages[0], Mapping):
        return [cast("Conversation", messages)]
    if not messages:
        return [[]]
    return list(cast("Sequence[Conversation]", messages))


def _params_for(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            f"params has {len(params)} entries for {count} prompts",
            field="params",
            hint="give one for all prompts, or one for each",
        )
    return list(params)


@contextmanager
def _naming(what: str, at: int, count: int) -> Iterator[None]:
    """Put the index of a prompt in front of what is wrong with it, if there are several."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        message = f"{what}[{at}]: {error.message}"
        raise type(error)(message, field=error.field, hint=error.hint) from error
