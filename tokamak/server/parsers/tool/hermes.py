"""Calls as Hermes and Qwen models write them: `{"name": "f", "arguments": {...}}` between `<tool_call>` tags.

A call is handed on when it is complete. A block that is no call is content as it stands.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, cast

from tokamak.server.parsers.base import Arguments, CallEnd, CallStart, Piece, ToolParser

OPENING: Final = "<tool_call>"

ENDING: Final = "</tool_call>"

_BROKEN_OFF: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")(?:\s*,\s*(?:"arguments"\s*:\s*(.*))?)?', re.DOTALL
)
"""The beginning of a call from which its name is known, and as much of its arguments as there is."""


class HermesParser(ToolParser):
    """Reads JSON between tags."""

    opening = OPENING

    def _read_block(self, pieces: list[Piece]) -> bool:
        body, ending, rest = self._held.partition(ENDING)
        if not ending:
            return False
        self._held = rest
        if self._hand_on_call(pieces, body):
            self._leave_block()
        else:
            self._inside = False
            self._say(pieces, self._layout + OPENING + body + ENDING)
        return True

    def _finish_block(self, pieces: list[Piece], *, cut: bool) -> None:
        if self._hand_on_call(pieces, self._held):
            return
        if not cut:
            self._say(pieces, self._layout + OPENING + self._held)
            return
        found = _BROKEN_OFF.match(self._held)
        name = _parsed(found[1]) if found else None
        if found is not None and isinstance(name, str):
            pieces.append(CallStart(self._calls, name))
            if found[2]:
                pieces.append(Arguments(self._calls, found[2]))
        elif self._held.strip() and not self._held.lstrip().startswith("{"):
            self._say(pieces, self._layout + OPENING + self._held)

    def _hand_on_call(self, pieces: list[Piece], body: str) -> bool:
        """Hand on the call that the text is; False if it is none."""
        value = _parsed(body)
        if not isinstance(value, dict):
            return False
        call = cast("dict[str, Any]", value)
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return False
        text = json.dumps(arguments, ensure_ascii=False)
        at = self._calls
        pieces += [CallStart(at, name), Arguments(at, text), CallEnd(at)]
        self._calls += 1
        return True


def _parsed(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
