"""Calls in DSML, the markup of DeepSeek V4 and V4.1; `text/dsml.py` writes it.

Arguments are handed on as they are written: text piece by piece, other values once they are complete. A value that
should be JSON and is none is handed on as text. Where the markup breaks, a call that has begun stays without an end
and the rest of the block is content.
"""

from __future__ import annotations

import json
from typing import NoReturn

from tokamak.server.parsers.base import Arguments, CallEnd, CallStart, Piece, ToolParser, begun
from tokamak.text.dsml import DSML, Dialect

TEXT_VALUE, JSON_VALUE = '" string="true">', '" string="false">'


BAR = DSML[0]
"""What half a tag holds, and text that only looks like one hardly ever."""


class DsmlParser(ToolParser):
    """Reads one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        super().__init__()
        self.opening = dialect.tag(dialect.calls)
        self._end = dialect.end(dialect.calls)
        self._call = dialect.tag("invoke", ' name="').removesuffix(">")
        self._call_end = dialect.end("invoke")
        self._value = dialect.tag("parameter", ' name="').removesuffix(">")
        self._value_end = dialect.end("parameter")
        self._names: list[str] | None = None
        """Of the open call's parameters so far; None between calls."""
        self._kind = ""
        """Of the open value: how its tag ended; empty between values."""
        self._empty = True
        """The block has no call yet, so all of it can still be content."""

    def _read_block(self, pieces: list[Piece]) -> bool:
        if self._kind:
            return self._read_value(pieces)
        rest = self._held.lstrip()
        if self._names is None:
            return self._between_calls(pieces, rest)
        return self._between_values(pieces, rest)

    def _between_calls(self, pieces: list[Piece], rest: str) -> bool:
        if rest.startswith(self._end):
            self._held = rest.removeprefix(self._end)
            self._leave_block()
            self._empty = True
            return True
        match _tag(rest, self._call, ('">',)):
            case (name, ending):
                self._held = rest[len(self._call) + len(name) + len(ending) :]
                pieces.append(CallStart(self._calls, name))
                self._names, self._empty = [], False
                return True
            case waits:
                return self._wait_or_give_up(pieces, waits or self._end.startswith(rest))

    def _between_values(self, pieces: list[Piece], rest: str) -> bool:
        assert self._names is not None
        if rest.startswith(self._call_end):
            self._held = rest.removeprefix(self._call_end)
            self._argue(pieces, "}" if self._names else "{}")
            pieces.append(CallEnd(self._calls))
            self._calls += 1
            self._names = None
            return True
        match _tag(rest, self._value, (TEXT_VALUE, JSON_VALUE)):
            case (name, ending) if name not in self._names:
                self._held = rest[len(self._value) + len(name) + len(ending) :]
                begin = ("{" if not self._names else ", ") + _json(name) + ": "
                self._argue(pieces, begin + ('"' if ending == TEXT_VALUE else ""))
                self._names.append(name)
                self._kind = ending
                return True
            case (_, _):
                return self._wait_or_give_up(pieces, False)
            case waits:
                return self._wait_or_give_up(pieces, waits or self._call_end.startswith(rest))

    def _read_value(self, pieces: list[Piece]) -> bool:
        at = self._held.find(self._value_end)
        if self._kind == TEXT_VALUE:
            end = len(self._held) - begun(self._held, self._value_end) if at < 0 else at
            self._argue(pieces, _json(self._held[:end])[1:-1])
            self._held = self._held[end:]
            at = 0 if at >= 0 else at
        if at < 0:
            return False
        self._argue(pieces, '"' if self._kind == TEXT_VALUE else _value(self._held[:at]))
        self._held = self._held[at + len(self._value_end) :]
        self._kind = ""
        return True

    def _wait_or_give_up(self, pieces: list[Piece], waits: bool) -> bool:
        """Wait while the text may still become a tag, else leave the block: its rest is content."""
        if not waits:
            self._give_up(pieces)
        return not waits

    def _give_up(self, pieces: list[Piece]) -> None:
        if self._empty:
            self._say(pieces, self._layout + self.opening)
        if self._names is not None:
            self._calls += 1
        self._names, self._inside, self._empty = None, False, True

    def _finish_block(self, pieces: list[Piece], *, cut: bool) -> None:
        rest = self._held
        if self._kind:
            half = begun(rest, self._value_end)
            is_tag = cut or BAR in rest[len(rest) - half :]
            text = rest[: len(rest) - half] if is_tag else rest
            self._argue(pieces, _json(text)[1:-1] if self._kind == TEXT_VALUE else text)
        elif not cut and (self._empty or rest.strip()):
            self._give_up(pieces)
            self._say(pieces, rest)

    def _is_markup(self, held: str) -> bool:
        return BAR in held

    def _argue(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append(Arguments(self._calls, text))


def _tag(text: str, prefix: str, endings: tuple[str, ...]) -> tuple[str, str] | bool:
    """The name in a tag and how the tag ends; if it is none, whether it may become one."""
    if not text.startswith(prefix):
        return prefix.startswith(text)
    name, quote, rest = text[len(prefix) :].partition('"')
    if "\n" in name or (quote and not name):
        return False
    for ending in endings:
        if (quote + rest).startswith(ending):
            return name, ending
    return any(ending.startswith(quote + rest) for ending in endings)


def _value(text: str) -> str:
    """The text itself if it is JSON, else a JSON string of it."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _json(text)
    return text.strip()


def _refuse(constant: str) -> NoReturn:
    """NaN and Infinity are no JSON, whatever Python says."""
    raise ValueError(constant)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
