"""How does /v1/chat/completions answer?

The body becomes messages and sampling parameters, the chat template makes a prompt, the engine continues it. The
answer is read for reasoning and tool calls, and goes out whole, or as a stream of deltas in which the first of each
choice has the role and the last the finish reason.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from fastapi import APIRouter, Request, Response

from tokamak.core.generation import GenerationEvent, GenerationRequest, TokenLogprob
from tokamak.core.request import FinishReason, SamplingParams
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
from tokamak.server.parsers.answer import (
    AnswerDelta,
    AnswerReader,
    answer_reader,
    reads_special_tokens,
)
from tokamak.server.prompt import chat_prompt, message_text
from tokamak.server.protocol.answers import UsageBody, prompt_logprobs_body
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
from tokamak.server.protocol.tools import answer_calls, call_news
from tokamak.server.sse import EventStream, event
from tokamak.server.state import server_state
from tokamak.server.tools import tool_use
from tokamak.text.chat_format import ReasoningFormat, ToolFormat

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
    reasoning_format: ReasoningFormat | None
    tool_format: ToolFormat | None

    def reader(self) -> AnswerReader:
        """What reads one choice."""
        parallel = self.body.parallel_tool_calls is not False
        formats = self.reasoning_format, self.tool_format
        return answer_reader(self.prompt, *formats, parallel=parallel)

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
    template = client.chat_template
    use = tool_use(body, template)
    constraint = params.structured or use.constraint
    constraint_field = body.constraint_field if params.structured else "tools"
    prompt = chat_prompt(
        template,
        body.messages,
        body,
        tools=use.tools,
        response_schema=body.answer_schema,
        constrained_by=constraint_field if constraint else None,
    )
    await check_constraint(constraint, constraint_field)
    # A constraint holds from the first character, so there is no reasoning to be told from the answer.
    reasoning = template.reasoning_format if template is not None and constraint is None else None
    shows_all = reads_special_tokens(client.tokenizer, reasoning, use.format)
    return _Chat(
        id=new_id("chatcmpl"),
        created=int(time.time()),
        model=model,
        body=body,
        params=msgspec.structs.replace(
            params,
            structured=constraint,
            skip_special_tokens=params.skip_special_tokens and not shows_all,
        ),
        prompt=prompt,
        prefix=message_text(body.messages[-1]) if body.echo else "",
        names=names,
        reasoning_format=reasoning,
        tool_format=use.format,
    )


def _finish_reason(reason: FinishReason, reader: AnswerReader) -> str:
    return "tool_calls" if reason is FinishReason.STOP and reader.called else reason.value


def _completion(chat: _Chat, choices: list[Collected], usage: UsageBody) -> ChatCompletion:
    first = choices[0]
    prompt_logprobs = prompt_logprobs_body(first.prompt_logprobs)
    return ChatCompletion(
        id=chat.id,
        created=chat.created,
        model=chat.model,
        choices=[_choice(chat, index, choice) for index, choice in enumerate(choices)],
        usage=usage,
        prompt_logprobs=msgspec.UNSET if prompt_logprobs is None else prompt_logprobs,
        prompt_token_ids=list(first.prompt_ids) if chat.body.return_token_ids else msgspec.UNSET,
    )


def _choice(chat: _Chat, index: int, made: Collected) -> ChatChoice:
    assert made.finish_reason is not None, "a choice ended without a reason"
    reader = chat.reader()
    answer = reader.feed(made.text)
    reader.finish(cut=made.finish_reason is FinishReason.LENGTH, into=answer)
    content = chat.prefix + answer.content
    return ChatChoice(
        index=index,
        message=AnswerMessage(
            content if content or not answer.calls else None,
            reasoning_content=answer.reasoning or msgspec.UNSET,
            tool_calls=answer_calls(answer.calls) if answer.calls else msgspec.UNSET,
        ),
        logprobs=(
            ChatLogprobs(chat_logprobs(made.logprobs or ()))
            if chat.params.logprobs is not None
            else None
        ),
        finish_reason=_finish_reason(made.finish_reason, reader),
        stop_reason=made.stop_reason,
        token_ids=made.token_ids if chat.body.return_token_ids else msgspec.UNSET,
    )


@dataclass(slots=True)
class _Streamed:
    """One choice on its way: what came with text that its reader still holds back."""

    reader: AnswerReader
    opened: bool = False
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_ids: tuple[int, ...] = ()


async def _chunks(
    chat: _Chat, first: PromptEvent, events: AsyncGenerator[PromptEvent]
) -> AsyncGenerator[bytes]:
    """The events of a stream, one per engine event with news, and the usage at the end if it was asked for."""
    options = chat.body.stream_options
    usage = UsageCount()
    choices: dict[int, _Streamed] = {}
    with_usage = options is not None and bool(options.include_usage)
    running_usage = options is not None and bool(options.continuous_usage_stats)

    def chunk(news: GenerationEvent) -> bytes | None:
        usage.see(0, news)
        if news.sibling not in choices:
            choices[news.sibling] = _Streamed(chat.reader())
        own = choices[news.sibling]
        own.prompt_ids = own.prompt_ids or news.prompt_ids
        opening = not own.opened
        choice = _chunk_choice(chat, own, news)
        if choice is None:
            return None
        made = ChatChunk(
            id=chat.id,
            created=chat.created,
            model=chat.model,
            choices=[choice],
            usage=usage.body() if running_usage else None if with_usage else msgspec.UNSET,
            prompt_token_ids=(
                list(own.prompt_ids)
                if chat.body.return_token_ids and own.prompt_ids and opening
                else msgspec.UNSET
            ),
        )
        return event(made)

    async with aclosing(events):
        if (made := chunk(first[1])) is not None:
            yield made
        async for _, news in events:
            if (made := chunk(news)) is not None:
                yield made
    if with_usage:
        end = ChatChunk(
            id=chat.id, created=chat.created, model=chat.model, choices=[], usage=usage.body()
        )
        yield event(end)


def _chunk_choice(chat: _Chat, own: _Streamed, news: GenerationEvent) -> ChunkChoice | None:
    """The news of a choice; None while all of it is held back."""
    answer = own.reader.feed(news.text)
    own.token_ids += news.token_ids
    own.logprobs += news.logprobs or ()
    finish = news.finish_reason
    if finish is not None:
        own.reader.finish(cut=finish is FinishReason.LENGTH, into=answer)
    elif not answer:
        return None
    token_ids, own.token_ids = own.token_ids, []
    logprobs, own.logprobs = own.logprobs, []
    return ChunkChoice(
        index=news.sibling,
        delta=_delta(chat, own, answer),
        logprobs=(
            ChatLogprobs(chat_logprobs(tuple(logprobs)))
            if chat.params.logprobs is not None and token_ids
            else None
        ),
        finish_reason=None if finish is None else _finish_reason(finish, own.reader),
        stop_reason=msgspec.UNSET if finish is None else news.stop_reason,
        token_ids=token_ids if chat.body.return_token_ids else msgspec.UNSET,
    )


def _delta(chat: _Chat, own: _Streamed, answer: AnswerDelta) -> Delta:
    opening, own.opened = not own.opened, True
    content = (chat.prefix if opening else "") + answer.content
    return Delta(
        role="assistant" if opening else msgspec.UNSET,
        content=content if content or (opening and not answer) else msgspec.UNSET,
        reasoning_content=answer.reasoning or msgspec.UNSET,
        tool_calls=[call_news(call) for call in answer.calls] or msgspec.UNSET,
    )
