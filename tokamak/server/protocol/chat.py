"""What does a client send to /v1/chat/completions, and what does it get back?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from tokamak.core.generation import Alternative, TokenLogprob
from tokamak.core.request import MAX_LOGPROBS, SamplingParams
from tokamak.errors import RequestError
from tokamak.server.protocol.answers import PromptLogprobs, UsageBody, finite
from tokamak.server.protocol.common import AtFirstWrong, Body, Int64, Items
from tokamak.server.protocol.sampling import SamplingFields
from tokamak.server.protocol.tools import AnswerCall, CallNews, ToolCall, ToolChoice

MAX_METADATA = 16


class TextPart(Body):
    """A part of a message's content; this server reads text."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _be_text(cls, data: object) -> object:
        """Say that a part is an image before saying that it has unknown fields."""
        if isinstance(data, dict):
            data = cast("dict[str, object]", data)
            kind = data.get("type")
            if isinstance(kind, str) and kind != "text":
                message = "this server reads only parts of type 'text'"
                raise PydanticCustomError("wrong_value", message, {"name": "type", "value": kind})
        return data


class Message(Body):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Items[None] | None = None
    """Clients send an earlier answer back as it was: these come as null or empty."""


Messages = Annotated[list[Message], AtFirstWrong(), Field(max_length=10_000)]


def _few(value: object) -> object:
    """Metadata is a few texts, as in OpenAI's API."""
    if isinstance(value, dict):
        value = cast("dict[str, object]", value)
        if len(value) > MAX_METADATA:
            limit = {"limit": MAX_METADATA}
            raise PydanticCustomError("too_many", "it must have at most {limit} names", limit)
    return value


class ChatTemplateFields(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = None
    """End the prompt where the assistant's answer begins; on unless a message is continued."""
    continue_final_message: bool | None = None
    """Let the model go on with the last message instead of starting a new one."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the template."""
    reasoning_effort: str | int | None = None
    """How much to reason, in words or numbers the model knows; "none" turns reasoning off."""
    tools: Items[dict[str, Any]] | None = None
    """Functions the model may call."""


class ChatRequest(SamplingFields, ChatTemplateFields):
    """The body of /v1/chat/completions."""

    messages: Messages
    """The conversation so far."""
    max_completion_tokens: Int64 | None = None
    """The most tokens to generate; the rest of the context if left out."""
    logprobs: bool | None = None
    """Add the log-probability of every token."""
    top_logprobs: Int64 | None = None
    """And those of this many alternatives, up to 20."""
    tool_choice: ToolChoice | None = None
    """Whether tools may be called, must be, or which one; "auto" if left out."""
    parallel_tool_calls: bool | None = None
    """False hands on only the first call."""

    # Fields of OpenAI's that cannot change the answer of this server.
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] | None = None
    """Accepted; nothing is stored."""
    store: Literal[False] | None = None
    """Accepted; nothing is stored."""
    service_tier: Literal["auto", "default"] | None = None
    """Accepted; there is one tier."""
    safety_identifier: str | None = None
    """Accepted, as `user` is."""
    prompt_cache_key: str | None = None
    """Accepted; the prefix cache needs no hint."""
    prompt_cache_retention: str | None = None
    """Accepted; the prefix cache needs no hint."""

    # Fields whose plain values ask for nothing; the others need what we do not have.
    functions: Items[dict[str, Any]] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Items[Literal["text"]] | None = None
    """Only text."""
    verbosity: Literal["medium"] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    moderation: None = None
    prompt_cache_options: None = None

    def check(self) -> None:
        """Refuse what the types allow and this route does not."""
        self.check_stream()
        if self.functions:
            raise RequestError(
                "functions is not supported: tools has taken its place",
                field="functions",
                hint="give them as tools",
            )
        if self.top_logprobs is not None:
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise RequestError(
                    f"top_logprobs is {self.top_logprobs}; it must be between 0 and {MAX_LOGPROBS}",
                    field="top_logprobs",
                )
            if not self.logprobs:
                raise RequestError(
                    f"top_logprobs is {self.top_logprobs}, but logprobs is not true",
                    field="top_logprobs",
                    hint='add "logprobs": true',
                )
        if self.echo and not self.continue_final_message:
            raise RequestError(
                "echo is true, but continue_final_message is not: there is no text to repeat",
                field="echo",
                hint='add "continue_final_message": true, or leave echo out',
            )

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema that `response_format` holds the answer to, if it has one."""
        asked = self.response_format
        return None if asked is None or asked.json_schema is None else asked.json_schema.schema_

    @property
    def token_limit_name(self) -> str:
        """The field that limits the answer's length."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def params(self) -> SamplingParams:
        """The engine's form of the sampling fields."""
        limit = self.max_tokens
        if self.max_completion_tokens is not None:
            if limit is not None and limit != self.max_completion_tokens:
                raise RequestError(
                    f"max_completion_tokens is {self.max_completion_tokens} and max_tokens is"
                    f" {limit}; they mean the same",
                    field="max_completion_tokens",
                    hint="give one of them",
                )
            limit = self.max_completion_tokens
        if limit is not None and limit < 1:
            raise RequestError(
                f"{self.token_limit_name} is {limit}; a chat answer has at least 1 token",
                field=self.token_limit_name,
            )
        return self.sampling_params(
            max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None
        )


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the chat template takes them; what was left out stays out."""
    if not messages:
        raise RequestError("messages is empty; a chat needs at least one message", field="messages")
    return [_template_message(message, at) for at, message in enumerate(messages)]


def _template_message(message: Message, at: int) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise RequestError(
            f"messages[{at}].content is missing; a message of role {message.role} needs text",
            field=f"messages[{at}].content",
        )
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"messages[{at}].tool_calls is given for role {message.role}; only an assistant calls tools",
            field=f"messages[{at}].tool_calls",
        )
    made = message.model_dump(exclude_none=True)
    made["content"] = message.model_dump(include={"content"})["content"]
    return made


class TopLogprob(msgspec.Struct, frozen=True):
    """An alternative at one place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """The token at one place, and the most likely ones there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of an answer, one entry per token."""

    content: list[ChatLogprob]
    refusal: None = None


def chat_logprobs(tokens: tuple[TokenLogprob, ...]) -> list[ChatLogprob]:
    """Logprobs of tokens as chat answers write them."""
    return [
        ChatLogprob(
            token=token.chosen.token,
            logprob=finite(token.chosen.logprob),
            bytes=list(token.chosen.token_bytes),
            top_logprobs=[_top(other) for other in token.top],
        )
        for token in tokens
    ]


def _top(other: Alternative) -> TopLogprob:
    return TopLogprob(other.token, finite(other.logprob), list(other.token_bytes))


class AnswerMessage(msgspec.Struct, frozen=True):
    """What the assistant said; `content` is null where it only calls tools."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[AnswerCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new; the role comes with a choice's first chunk."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallNews] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """News of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
