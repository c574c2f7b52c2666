"""How do tools and their calls look in chat requests and answers?"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokamak.server.parsers.answer import CallDelta
from tokamak.server.protocol.common import Body


class FunctionCall(Body):
    """A call an assistant made earlier; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Body):
    """One earlier tool call of an assistant message."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None
    """Clients that joined a stream send it back; it means nothing."""


class FunctionName(Body):
    """A tool by its name."""

    name: str


class NamedTool(Body):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class AnswerFunction(msgspec.Struct, frozen=True):
    """What is called; `arguments` is JSON text unless the answer was cut short."""

    name: str
    arguments: str


class AnswerCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class FunctionNews(msgspec.Struct, frozen=True, kw_only=True):
    """A call's name comes once, its arguments piece by piece."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class CallNews(msgspec.Struct, frozen=True, kw_only=True):
    """News of one call in a stream."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionNews


def answer_calls(deltas: list[CallDelta]) -> list[AnswerCall]:
    """The calls of a whole answer, in their order."""
    by_index: dict[int, list[CallDelta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [
        AnswerCall(
            id=own[0].id or "",
            function=AnswerFunction(own[0].name or "", "".join(d.arguments for d in own)),
        )
        for own in by_index.values()
    ]


def call_news(delta: CallDelta) -> CallNews:
    """A delta as streams write it: id, type and name come with a call's first."""
    if delta.name is None:
        return CallNews(index=delta.index, function=FunctionNews(arguments=delta.arguments))
    return CallNews(
        index=delta.index,
        id=delta.id or "",
        type="function",
        function=FunctionNews(name=delta.name, arguments=delta.arguments),
    )
