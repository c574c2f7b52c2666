"""How does the text of one answer become what chat clients see: reasoning, content and tool calls?

`AnswerReader` runs the parsers of the model's chat format over the text as it comes, and gives calls their ids.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from tokamak.server.parsers.base import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    ReasoningParser,
    ToolParser,
)
from tokamak.server.parsers.reasoning import think_tags
from tokamak.server.parsers.reasoning.think_tags import ThinkTags
from tokamak.server.parsers.tool import hermes
from tokamak.server.parsers.tool.deepseek import DsmlParser
from tokamak.server.parsers.tool.hermes import HermesParser
from tokamak.text import dsml
from tokamak.text.chat_format import ReasoningFormat, ToolFormat
from tokamak.text.tokenizer import Tokenizer

TOOL_PARSERS: dict[ToolFormat, Callable[[], ToolParser]] = {
    "deepseek_v4": lambda: DsmlParser(dsml.V4),
    "deepseek_v41": lambda: DsmlParser(dsml.V41),
    "hermes": HermesParser,
}

REASONING_PARSERS: dict[ReasoningFormat, Callable[[str], ReasoningParser]] = {
    "think_tags": lambda prompt: ThinkTags(prompt, lines=False),
    "think_lines": lambda prompt: ThinkTags(prompt, lines=True),
}
"""Made for the answer to a prompt."""

MARKERS: dict[ToolFormat | ReasoningFormat, tuple[str, ...]] = {
    "deepseek_v4": (dsml.DSML,),
    "deepseek_v41": (dsml.DSML,),
    "hermes": (hermes.OPENING, hermes.ENDING),
    "think_tags": (think_tags.OPENING, think_tags.ENDING),
    "think_lines": (think_tags.OPENING, think_tags.ENDING),
}
"""Tokens that a format's parser must see in the text, also where the vocabulary calls them special."""


@dataclass(slots=True)
class CallDelta:
    """News of one call: its id and name at first, then more of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class AnswerDelta:
    """News of one answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list[CallDelta])

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


def answer_reader(
    prompt: str,
    reasoning: ReasoningFormat | None,
    tools: ToolFormat | None = None,
    *,
    parallel: bool = True,
) -> AnswerReader:
    """What reads the answer to a prompt in these formats; what has none stays content."""
    return AnswerReader(
        None if reasoning is None else REASONING_PARSERS[reasoning](prompt),
        None if tools is None else TOOL_PARSERS[tools](),
        parallel=parallel,
    )


def reads_special_tokens(
    tokenizer: Tokenizer, *formats: ToolFormat | ReasoningFormat | None
) -> bool:
    """Whether parsers of these formats look for tokens that are usually left out of the text."""
    markers = [marker for name in formats if name is not None for marker in MARKERS[name]]
    return any(tokenizer.is_special(marker) for marker in markers)


class AnswerReader:
    """Reads one answer; without parsers all of it is content."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        parallel: bool = True,
    ) -> None:
        """Read with these parsers; calls after the first are dropped unless `parallel`."""
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        self._started = self._ended = 0

    @property
    def called(self) -> bool:
        """Whether the answer calls tools, and no call was broken off."""
        return 0 < self._started == self._ended

    def feed(self, text: str) -> AnswerDelta:
        """Take more text."""
        delta = AnswerDelta()
        self._take(
            delta, [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        )
        return delta

    def finish(self, *, cut: bool, into: AnswerDelta | None = None) -> AnswerDelta:
        """The rest, when the answer has ended, added to `into`; `cut` says that it ended for length."""
        delta = AnswerDelta() if into is None else into
        if self._reasoning is not None:
            self._take(delta, self._reasoning.finish())
        if self._tools is not None:
            self._note(delta, self._tools.finish(cut=cut))
        return delta

    def _take(self, delta: AnswerDelta, pieces: list[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Content) and self._tools is not None:
                self._note(delta, self._tools.feed(piece.text))
            else:
                self._note(delta, [piece])

    def _note(self, delta: AnswerDelta, pieces: list[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    delta.reasoning += text
                case Content(text):
                    delta.content += text
                case CallStart(index) | Arguments(index) | CallEnd(index) if (
                    index and not self._parallel
                ):
                    continue
                case CallStart(index, name):
                    self._started += 1
                    delta.calls.append(CallDelta(index, f"call_{uuid.uuid4().hex[:24]}", name))
                case Arguments(index, text):
                    if not delta.calls or delta.calls[-1].index != index:
                        delta.calls.append(CallDelta(index))
                    delta.calls[-1].arguments += text
                case CallEnd():
                    self._ended += 1
