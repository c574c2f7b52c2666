"""Which tools may an answer call, and how is it made to?

In: a chat request and the model's chat format. Out: the tools that the prompt names, the parser's format, and the
constraint that holds an answer to calls where the client requires them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from tokamak.core.request import StructuredOutput
from tokamak.errors import GrammarError, RequestError
from tokamak.sampling.grammar import JSON_STYLE, check_schema, schema_text
from tokamak.server.parsers.tool import hermes
from tokamak.server.protocol.chat import ChatRequest
from tokamak.text.chat_format import ChatFormat, ToolFormat

TOOL_NAME: Final = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request's tools come to."""

    tools: Sequence[dict[str, Any]] = ()
    """Tools that the prompt names."""
    format: ToolFormat | None = None
    """How calls are found in the answer; None if they are not looked for."""
    constraint: StructuredOutput | None = None
    """Holds the answer to calls."""


def tool_use(body: ChatRequest, chat: ChatFormat | None) -> ToolUse:
    """What the tools of a request come to.

    Raises:
        RequestError: a tool is not described properly, or cannot be called as the request wants it.
    """
    choice = body.tool_choice or "auto"
    if not body.tools:
        if choice not in ("none", "auto"):
            raise RequestError(
                "tool_choice asks for a call, but there are no tools", field="tool_choice"
            )
        return ToolUse()
    if choice != "none" and (chat is None or chat.tool_format is None):
        raise RequestError(
            "tools is not supported by this model: how it writes calls is not known",
            field="tools",
            hint="leave tools out, or send an empty list",
        )
    names = check_tools(body.tools)
    if chat is None or choice == "none":
        return ToolUse()
    if body.structured() is not None:
        raise RequestError(
            f"tools are given with {body.constraint_field}, which leaves no room for a call",
            field=body.constraint_field,
            hint="give one of them, or tool_choice none",
        )
    if choice == "auto":
        return ToolUse(body.tools, chat.tool_format)
    if chat.tool_format != "hermes":
        raise RequestError(
            f"tool_choice {_brief(choice)} is not supported by this model: its calls cannot be enforced",
            field="tool_choice",
            hint='take "auto", and ask for the call in words',
        )
    wanted = names if choice == "required" else [cast("Any", choice).function.name]
    if not set(wanted) <= set(names):
        raise RequestError(
            f"tool_choice names {wanted[0]!r}, which is not among the tools {', '.join(names)}",
            field="tool_choice",
        )
    several = choice == "required" and body.parallel_tool_calls is not False
    grammar = _calls_grammar([t["function"] for t in body.tools], wanted, several=several)
    return ToolUse(body.tools, chat.tool_format, StructuredOutput(kind="grammar", value=grammar))


def check_tools(tools: Sequence[dict[str, Any]]) -> list[str]:
    """The names of tools, each a function as OpenAI's API describes it.

    Raises:
        RequestError: one is not.
    """
    names: list[str] = []
    for at, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise RequestError(
                f"tools[{at}].type is {tool.get('type')!r:.100}; this server knows tools of type 'function'",
                field=f"tools[{at}].type",
            )
        function = tool.get("function")
        if not isinstance(function, dict):
            raise RequestError(
                f"tools[{at}].function is {function!r:.100}; it must be an object with a name",
                field=f"tools[{at}].function",
            )
        described = cast("dict[str, Any]", function)
        name, parameters = described.get("name"), described.get("parameters")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name) or name in names:
            raise RequestError(
                f"tools[{at}].function.name is {name!r:.150}; it must be a name of its own, of letters,"
                " digits and _-.:",
                field=f"tools[{at}].function.name",
            )
        if parameters is not None and not isinstance(parameters, dict):
            raise RequestError(
                f"tools[{at}].function.parameters is {parameters!r:.100}; it must be a JSON schema",
                field=f"tools[{at}].function.parameters",
            )
        names.append(name)
    return names


def _calls_grammar(functions: list[dict[str, Any]], wanted: list[str], *, several: bool) -> str:
    """A Lark grammar of one call, or of several, to the wanted functions."""
    calls: list[str] = []
    rules: list[str] = []
    for function in functions:
        if function["name"] not in wanted:
            continue
        rule = f"call_{len(calls)}"
        schema = _styled(function["name"], function.get("parameters") or {"type": "object"})
        head = json.dumps(
            f'{hermes.OPENING}\n{{"name": {json.dumps(function["name"])}, "arguments": '
        )
        tail = json.dumps("}\n" + hermes.ENDING)
        rules.append(f"{rule}: {head} %json {schema} {tail}")
        calls.append(rule)
    more = ' ("\\n" call)*' if several else ""
    return "\n".join([f"start: call{more}", f"call: {' | '.join(calls)}", *rules])


def _styled(name: str, parameters: dict[str, Any]) -> str:
    """A tool's schema as a grammar takes it, held to the style of all JSON we write."""
    text = schema_text(parameters, field="tools")
    try:
        check_schema(text)
    except ValueError as error:
        message = f"parameters of the tool {name} cannot be used: {error}"
        raise GrammarError(message, field="tools") from None
    return json.dumps({**parameters, "x-guidance": JSON_STYLE}, ensure_ascii=False)


def _brief(choice: object) -> str:
    return choice if isinstance(choice, str) else "with a name"
