"""How does /v1/completions answer?

Every prompt, times n, is a choice: index = prompt's place * n + sibling. With echo the prompt's text, and its
logprobs if asked for, come before the generated ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import msgspec
from fastapi import APIRouter, Request, Response

from tokamak.core.generation import Alternative, GenerationEvent, GenerationRequest, TokenLogprob
from tokamak.core.request import SamplingParams
from tokamak.engine.admission import Admission
from tokamak.engine.client import EngineClient
from tokamak.server.body import read_body
from tokamak.server.disconnect import unless_gone
from tokamak.server.generate import (
    Collected,
    PromptEvent,
    UsageCount,
    check_constraint,
    collect,
    first_event,
    new_id,
    run,
)
from tokamak.server.openapi import answers, takes
from tokamak.server.protocol.answers import UsageBody, prompt_logprobs_body
from tokamak.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    LogprobWriter,
    joined,
)
from tokamak.server.sse import EventStream, event
from tokamak.server.state import server_state
from tokamak.text.tokenizer import Tokenizer

router = APIRouter(tags=["openai"])


@dataclass(frozen=True, slots=True)
class _Job:
    """One request, settled."""

    id: str
    created: int
    model: str
    body: CompletionRequest
    params: SamplingParams
    prompts: list[str | tuple[int, ...]]
    tokenizer: Tokenizer
    requests: list[GenerationRequest]
    names: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def hidden_ids(self) -> frozenset[int]:
        """Tokens that leave nothing in a choice's text."""
        skip = self.params.skip_special_tokens
        return self.tokenizer.special_ids if skip else frozenset()

    def echo_text(self, at: int) -> str:
        """The text of a prompt, as its choices repeat it."""
        prompt = self.prompts[at]
        if isinstance(prompt, str):
            return prompt
        return self.tokenizer.decode(
            list(prompt), skip_special_tokens=self.params.skip_special_tokens
        )


@router.post(
    "/v1/completions",
    openapi_extra=takes(CompletionRequest),
    responses=answers(Completion, stream=Completion),
    response_model=None,
)
async def create_completion(request: Request) -> Response:
    """Continue prompts."""
    state = server_state(request)
    client = state.engine()
    body = await read_body(request, CompletionRequest)
    job = await _settle(body, state.model_name(body.model), client)
    events = run(client, job.requests, state.metrics)
    if not body.stream:
        choices, usage = await unless_gone(
            request.receive, collect(events, job.params.n, job.names)
        )
        answer = msgspec.json.encode(_completion(job, choices, usage))
        return Response(answer, media_type="application/json")
    first = await first_event(request.receive, events, job.names)
    return EventStream(_chunks(job, first, events), request.state.request_id)


async def _settle(body: CompletionRequest, model: str, client: EngineClient) -> _Job:
    body.check()
    params = body.params()
    params.validate(client.info.vocab_tokens)
    prompts = body.prompts()
    job_id = new_id("cmpl")
    requests = [
        GenerationRequest(
            request_id=f"{job_id}-{at}",
            prompt=prompt,
            params=params,
            add_special_tokens=body.add_special_tokens is not False,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        for at, prompt in enumerate(prompts)
    ]
    await check_constraint(params.structured, body.constraint_field)
    admission = Admission(client.tokenizer, client.info.vocab_tokens, client.info.max_model_len)
    for prompt in prompts:
        if not isinstance(prompt, str):
            # Before its ids are looked at: a list that is far too long would take its time.
            admission.settle_max_tokens(len(prompt), params)
    if len(requests) > 1:
        # One of several prompts must not fail after the others have begun, so all are looked at first.
        requests = await asyncio.to_thread(_encoded, requests, admission)
    return _Job(
        id=job_id,
        created=int(time.time()),
        model=model,
        body=body,
        params=params,
        prompts=prompts,
        tokenizer=client.tokenizer,
        requests=requests,
    )


def _encoded(requests: list[GenerationRequest], admission: Admission) -> list[GenerationRequest]:
    """The same requests with ids for text, after each has been found to be one we can run."""
    return [replace(r, prompt=tuple(admission.admit(r)[0].prompt_ids)) for r in requests]


class _Writer:
    """Makes choices of events; it knows how far each choice's text is."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._logprobs: dict[int, LogprobWriter] = {}

    def choice(self, at: int, sibling: int, news: Collected | GenerationEvent) -> CompletionChoice:
        """News of a choice; its first brings what is said of the prompt."""
        job = self._job
        index = at * job.params.n + sibling
        opening = index not in self._logprobs
        writer = self._logprobs.setdefault(index, LogprobWriter(job.hidden_ids))
        echo = bool(job.body.echo) and opening
        text = job.echo_text(at) + news.text if echo else news.text
        prompt_logprobs = (
            prompt_logprobs_body(news.prompt_logprobs)
            if job.body.prompt_logprobs is not None and opening
            else None
        )
        with_ids = bool(job.body.return_token_ids)
        finish = news.finish_reason
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._entries(writer, news, echo),
            finish_reason=None if finish is None else finish.value,
            stop_reason=news.stop_reason,
            prompt_logprobs=msgspec.UNSET if prompt_logprobs is None else prompt_logprobs,
            prompt_token_ids=list(news.prompt_ids) if with_ids and opening else msgspec.UNSET,
            token_ids=list(news.token_ids) if with_ids else msgspec.UNSET,
        )

    def _entries(
        self, writer: LogprobWriter, news: Collected | GenerationEvent, echo: bool
    ) -> CompletionLogprobs | None:
        if self._job.params.logprobs is None:
            return None
        before: CompletionLogprobs | None = None
        if echo:
            positions: tuple[TokenLogprob | None, ...] = news.prompt_logprobs or ()
            before = writer.write_prompt(self._token(news.prompt_ids[0]), positions)
        entries = writer.write(news.logprobs or ())
        return entries if before is None else joined(before, entries)

    def _token(self, token_id: int) -> Alternative:
        tokenizer = self._job.tokenizer
        return Alternative(
            token_id=token_id,
            token=tokenizer.token_text(token_id),
            token_bytes=tokenizer.token_bytes(token_id),
            logprob=0.0,
        )


def _completion(job: _Job, choices: list[Collected], usage: UsageBody) -> Completion:
    writer = _Writer(job)
    return Completion(
        id=job.id,
        created=job.created,
        model=job.model,
        choices=[
            writer.choice(*divmod(index, job.params.n), choice)
            for index, choice in enumerate(choices)
        ],
        usage=usage,
    )


async def _chunks(
    job: _Job, first: PromptEvent, events: AsyncGenerator[PromptEvent]
) -> AsyncGenerator[bytes]:
    """The events of a stream, one per engine event, and the usage at the end if it was asked for."""
    options = job.body.stream_options
    usage = UsageCount()
    writer = _Writer(job)
    with_usage = options is not None and bool(options.include_usage)
    running_usage = options is not None and bool(options.continuous_usage_stats)

    def chunk(at: int, news: GenerationEvent) -> bytes:
        usage.see(at, news)
        made = Completion(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=[writer.choice(at, news.sibling, news)],
            usage=usage.body() if running_usage else None if with_usage else msgspec.UNSET,
        )
        return event(made)

    async with aclosing(events):
        yield chunk(*first)
        async for at, news in events:
            yield chunk(at, news)
    if with_usage:
        end = Completion(
            id=job.id, created=job.created, model=job.model, choices=[], usage=usage.body()
        )
        yield event(end)
