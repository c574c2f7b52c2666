"""What does a parser of answers take, and what does it give?

In: the text of one answer, in pieces cut anywhere. Out: the same as typed pieces. However the text was cut, the
joined pieces are the same; a parser never raises, and what it cannot make sense of comes out as content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the tool `name` begins; calls of an answer are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, which are JSON text once the call has ended."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete; a call without an end was broken off."""

    index: int


Piece = Reasoning | Content | CallStart | Arguments | CallEnd


class ReasoningParser(ABC):
    """Divides one answer into Reasoning and Content."""

    @abstractmethod
    def feed(self, text: str) -> list[Piece]:
        """Take more of the answer."""

    @abstractmethod
    def finish(self) -> list[Piece]:
        """What was held back, once it is known that nothing follows."""


class ToolParser(ABC):
    """Finds the calls in one answer's content: blocks that begin with `opening`.

    Line ends before a block, and those after one that nothing follows, are layout and left out.
    """

    opening: str

    def __init__(self) -> None:
        self._held: str = ""
        self._inside: bool = False
        self._layout: str = ""
        """The line ends before the block that is being read."""
        self._after_block: bool = False
        self._calls: int = 0

    def feed(self, text: str) -> list[Piece]:
        """Take more of the content."""
        self._held += text
        pieces: list[Piece] = []
        while self._read_block(pieces) if self._inside else self._find_block(pieces):
            pass
        return pieces

    def finish(self, *, cut: bool) -> list[Piece]:
        """What was held back; `cut` says that the answer ended for length, so that half a tag is no text."""
        pieces: list[Piece] = []
        if self._inside:
            self._finish_block(pieces, cut=cut)
        elif not (cut and self._is_markup(self._held)) and not (
            self._after_block and not self._held.strip("\n")
        ):
            self._say(pieces, self._held)
        self._held = ""
        return pieces

    @abstractmethod
    def _read_block(self, pieces: list[Piece]) -> bool:
        """Read on in a block; False when that takes more text."""

    @abstractmethod
    def _finish_block(self, pieces: list[Piece], *, cut: bool) -> None:
        """The answer ended inside a block."""

    def _is_markup(self, held: str) -> bool:
        """Whether the beginning of `opening` that the held text ends with cannot be ordinary text."""
        del held
        return False

    def _leave_block(self) -> None:
        self._inside, self._after_block = False, True

    def _say(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append(Content(text))
            self._after_block = False

    def _find_block(self, pieces: list[Piece]) -> bool:
        """Hand text on until a block begins; line ends and what may become `opening` are held back."""
        at = self._held.find(self.opening)
        end = len(self._held) - begun(self._held, self.opening) if at < 0 else at
        text = self._held[:end].rstrip("\n")
        self._say(pieces, text)
        if at < 0:
            self._held = self._held[len(text) :]
            return False
        self._layout = self._held[len(text) : at]
        self._held = self._held[at + len(self.opening) :]
        self._inside = True
        return True


def begun(text: str, marker: str) -> int:
    """How many characters of `marker` the text ends with, if not all of them."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
