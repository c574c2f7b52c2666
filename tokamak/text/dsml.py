"""DSML, the markup in which DeepSeek V4 and V4.1 call tools: its tags, and how a call is written.

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="f">
    <｜DSML｜ parameter name="k" string="true">raw text</｜DSML｜ parameter>
    <｜DSML｜ parameter name="n" string="false">3</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

A value is text as it stands, or JSON where `string` is false; nothing is escaped. `server/parsers/tool/deepseek.py`
reads it back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

DSML = "｜DSML｜"
"""The one special token of the markup; what stands around it in a tag is ordinary text."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one release spells the tags."""

    calls: str
    """The name of the block."""
    gap: str
    """What stands between the special token and a tag's name."""

    def tag(self, name: str, attributes: str = "") -> str:
        """An opening tag."""
        return f"<{DSML}{self.gap}{name}{attributes}>"

    def end(self, name: str) -> str:
        """A closing tag."""
        return f"</{DSML}{self.gap}{name}>"


V4 = Dialect(calls="tool_calls", gap="")

V41 = Dialect(calls="calls", gap=" ")


def write_calls(dialect: Dialect, tool_calls: Sequence[Mapping[str, Any]]) -> str:
    """The block of an assistant turn that made these calls, as OpenAI's API has them."""
    written = [_invoke(dialect, call["function"]) for call in tool_calls]
    return "\n".join([dialect.tag(dialect.calls), *written, dialect.end(dialect.calls)])


def to_json(value: Any) -> str:
    """JSON as the models were trained on: letters as they are, a blank after commas and colons."""
    return json.dumps(value, ensure_ascii=False)


def _invoke(dialect: Dialect, function: Mapping[str, Any]) -> str:
    lines = [dialect.tag("invoke", f' name="{function["name"]}"')]
    parameters = [_parameter(dialect, name, value) for name, value in _arguments(function).items()]
    lines.append("\n".join(parameters))
    return "\n".join([*lines, dialect.end("invoke")])


def _parameter(dialect: Dialect, name: str, value: Any) -> str:
    is_text = isinstance(value, str)
    opening = dialect.tag("parameter", f' name="{name}" string="{"true" if is_text else "false"}"')
    return opening + (value if is_text else to_json(value)) + dialect.end("parameter")


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name; what is no JSON object becomes the value of one named `arguments`."""
    given = function.get("arguments")
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            value = None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {"arguments": given}
