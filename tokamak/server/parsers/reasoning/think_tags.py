"""Reasoning between `<think>` and `</think>`, at the beginning of an answer.

The prompt may have opened the block, and may have closed it, too; otherwise the model opens it or does not.
"""

from __future__ import annotations

from typing import Final, Literal

from tokamak.server.parsers.base import Content, Piece, Reasoning, ReasoningParser, begun

OPENING: Final = "<think>"

ENDING: Final = "</think>"


class ThinkTags(ReasoningParser):
    """Divides an answer at its tags."""

    def __init__(self, prompt: str, *, lines: bool) -> None:
        """Divide the answer to `prompt`; with `lines`, line ends at the tags are layout and left out."""
        self._lines = lines
        self._held = ""
        ending = prompt.rstrip()
        self._place: Literal["before", "inside", "after"] = "before"
        if ending.endswith(OPENING):
            self._place = "inside"
        elif ending.endswith(ENDING):
            self._place = "after"
        self._at_tag = self._place != "before" and not prompt.endswith("\n")
        """Only line ends have come since the last tag."""

    def feed(self, text: str) -> list[Piece]:
        """See ReasoningParser."""
        self._held += text
        pieces: list[Piece] = []
        if self._place == "before":
            self._look_for_opening()
        if self._place == "inside":
            self._read_reasoning(pieces)
        if self._place == "after":
            self._say(pieces, self._held)
            self._held = ""
        return pieces

    def finish(self) -> list[Piece]:
        """See ReasoningParser."""
        pieces: list[Piece] = []
        self._say(pieces, self._held)
        self._held = ""
        return pieces

    def _look_for_opening(self) -> None:
        start = self._held.lstrip()
        if start.startswith(OPENING):
            self._held = start.removeprefix(OPENING)
            self._place, self._at_tag = "inside", True
        elif not OPENING.startswith(start):
            self._place = "after"

    def _read_reasoning(self, pieces: list[Piece]) -> None:
        at = self._held.find(ENDING)
        end = len(self._held) - begun(self._held, ENDING) if at < 0 else at
        text = self._held[:end]
        shown = text.rstrip("\n") if self._lines else text
        self._say(pieces, shown)
        if at < 0:
            self._held = self._held[len(shown) :]
            return
        self._held = self._held[at + len(ENDING) :]
        self._place, self._at_tag = "after", True

    def _say(self, pieces: list[Piece], text: str) -> None:
        """Hand text on; line ends right after a tag are layout."""
        if self._lines and self._at_tag:
            text = text.lstrip("\n")
        if text:
            self._at_tag = False
            pieces.append(Reasoning(text) if self._place == "inside" else Content(text))
