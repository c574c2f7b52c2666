"""How does /v1/chat/completions answer?

The body becomes messages and sampling parameters, the chat template makes a prompt, the engine continues it. The
answer goes out whole, or as a stream of deltas in which the first of each choice has the role and the last the
finish reason.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec
from fastapi import APIRouter, Request, Response

from tokamak.core.generation import GenerationEvent, GenerationRequest
from tokamak.core.request import SamplingParams
from tokamak.engine.client import EngineClient
from tokamak.server.body import read_body
from tokamak.server.disconnect import unless_gone
from tokamak.server.generate import (
    Collected,
    PromptEvent,
    UsageCount,
    check_constraint,
    client_names,
    collect,
    first_event,
    new_id,
    run,
)
from tokamak.server.openapi import answers, takes
from tokamak.server.prompt import chat_prompt, message_text
from tokamak.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Delta,
    chat_logprobs,
)
from tokamak.server.protocol.common import UsageBody, prompt_logprobs_body
from tokamak.server.sse import EventStream, event
from tokamak.server.state import server_state

router = APIRouter(tags=["openai"])


@dataclass(frozen=True, slots=True)
class _Chat:
    """One request, settled."""

    id: str
    created: int
    model: str
    body: ChatRequest
    params: SamplingParams
    prompt: str
    prefix: str
    """Text that every choice begins with: the continued message, if the client wants it repeated."""
    names: dict[str, str]

    def request(self) -> GenerationRequest:
        """What the engine is asked for."""
        return GenerationRequest(
            request_id=self.id,
            prompt=self.prompt,
            params=self.params,
            add_special_tokens=False,
            priority=self.body.priority or 0,
            cache_salt=self.body.cache_salt or "",
        )


@router.post(
    "/v1/chat/completions",
    openapi_extra=takes(ChatRequest),
    responses=answers(ChatCompletion, stream=ChatChunk),
    response_model=None,
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state = server_state(request)
    client = state.engine()
    body = await read_body(request, ChatRequest)
    chat = await _settle(body, state.model_name(body.model), client)
    events = run(client, [chat.request()], state.metrics)
    if not body.stream:
        choices, usage = await unless_gone(
            request.receive, collect(events, chat.params.n, chat.names)
        )
        answer = msgspec.json.encode(_completion(chat, choices, usage))
        return Response(answer, media_type="application/json")
    first = await first_event(request.receive, events, chat.names)
    return EventStream(_chunks(chat, first, events), request.state.request_id)


async def _settle(body: ChatRequest, model: str, client: EngineClient) -> _Chat:
    body.check()
    names = {
        "logprobs": "top_logprobs",
        "prompt": "messages",
        "max_tokens": body.token_limit_name,
    }
    params = body.params()
    with client_names(names):
        params.validate(client.info.vocab_tokens)
    prompt = chat_prompt(client.chat_template, body.messages, body)
    await check_constraint(params.structured, body.constraint_field)
    return _Chat(
        id=new_id("chatcmpl"),
        created=int(time.time()),
        model=model,
        body=body,
        params=params,
        prompt=prompt,
        prefix=message_text(body.messages[-1]) if body.echo else "",
        names=names,
    )


def _completion(chat: _Chat, choices: list[Collected], usage: UsageBody) -> ChatCompletion:
    first = choices[0]
    prompt_logprobs = prompt_logprobs_body(first.prompt_logprobs)
    with_ids = chat.body.return_token_ids
    return ChatCompletion(
        id=chat.id,
        created=chat.created,
        model=chat.model,
        choices=[
            ChatChoice(
                index=index,
                message=AnswerMessage(chat.prefix + choice.text),
                logprobs=(
                    ChatLogprobs(chat_logprobs(choice.logprobs or ()))
                    if chat.params.logprobs is not None
                    else None
                ),
                finish_reason=str(choice.finish_reason),
                stop_reason=choice.stop_reason,
                token_ids=choice.token_ids if with_ids else msgspec.UNSET,
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage,
        prompt_logprobs=msgspec.UNSET if prompt_logprobs is None else prompt_logprobs,
        prompt_token_ids=list(first.prompt_ids) if with_ids else msgspec.UNSET,
    )


async def _chunks(
    chat: _Chat, first: PromptEvent, events: AsyncGenerator[PromptEvent]
) -> AsyncGenerator[bytes]:
    """The events of a stream, one per engine event, and the usage at the end if it was asked for."""
    options = chat.body.stream_options
    usage = UsageCount()
    started: set[int] = set()
    with_usage = options is not None and bool(options.include_usage)
    running_usage = options is not None and bool(options.continuous_usage_stats)

    def chunk(news: GenerationEvent) -> bytes:
        usage.see(0, news)
        opening = news.sibling not in started
        started.add(news.sibling)
        if opening and chat.prefix:
            news = replace(news, text=chat.prefix + news.text)
        made = ChatChunk(
            id=chat.id,
            created=chat.created,
            model=chat.model,
            choices=[_chunk_choice(chat, news, opening)],
            usage=usage.body() if running_usage else None if with_usage else msgspec.UNSET,
            prompt_token_ids=(
                list(news.prompt_ids)
                if chat.body.return_token_ids and news.prompt_ids and opening
                else msgspec.UNSET
            ),
        )
        return event(made)

    async with aclosing(events):
        yield chunk(first[1])
        async for _, news in events:
            yield chunk(news)
    if with_usage:
        end = ChatChunk(
            id=chat.id, created=chat.created, model=chat.model, choices=[], usage=usage.body()
        )
        yield event(end)


def _chunk_choice(chat: _Chat, news: GenerationEvent, opening: bool) -> ChunkChoice:
    if opening:
        delta = Delta(role="assistant", content=news.text)
    elif news.text:
        delta = Delta(content=news.text)
    else:
        delta = Delta()
    finish = news.finish_reason
    return ChunkChoice(
        index=news.sibling,
        delta=delta,
        logprobs=(
            ChatLogprobs(chat_logprobs(news.logprobs))
            if news.logprobs is not None and news.token_ids
            else None
        ),
        finish_reason=None if finish is None else finish.value,
        stop_reason=msgspec.UNSET if finish is None else news.stop_reason,
        token_ids=list(news.token_ids) if chat.body.return_token_ids else msgspec.UNSET,
    )
