"""How DeepSeek V4 and V4.1 want a conversation written. Their checkpoints come without a Jinja template.

A prompt is BOS and the turns. A user's turn ends with the header of the answer, which opens a block of reasoning
(`<think>`) or says that there is none (`</think>`). There is no tool role: results stand in a user's turn, in the
order of the calls. Reasoning from before the last user's turn is dropped, unless tools are given.

V4.1 marks system turns, lets them come at any place, where they count as a user's, and states the effort of
reasoning as a number. The wording of TOOLS, RESPONSE_SCHEMA and the efforts is the one the models were trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from tokamak.errors import TemplateError
from tokamak.text import dsml
from tokamak.text.chat_format import (
    ChatFormat,
    ToolFormat,
    check_variables,
    checked_unicode,
    part_texts,
)

BOS: Final = "<｜begin▁of▁sentence｜>"

EOS: Final = "<｜end▁of▁sentence｜>"

SYSTEM: Final = "<｜System｜>"

USER: Final = "<｜User｜>"

ASSISTANT: Final = "<｜Assistant｜>"

THINK: Final = "<think>"

END_OF_THINK: Final = "</think>"

ROLES: Final = ("system", "developer", "user", "assistant", "tool")

V41_EFFORTS: Final = {"low": 50, "high": 75, "xhigh": 75, "max": 100}

V4_EFFORTS: Final = {
    "high": "",
    "max": (
        "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
        "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the"
        " root cause, rigorously stress-testing your logic against all potential paths, edge cases, and"
        " adversarial scenarios.\n"
        "Explicitly write out your entire deliberation process, documenting every intermediate step,"
        " considered alternative, and rejected hypothesis to ensure absolutely no assumption is left"
        " unchecked.\n\n"
    ),
}

RESPONSE_SCHEMA: Final = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)


TOOLS: Final = """\
## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "{calls}" block like the following:

{calls}
{invoke} name="$TOOL_NAME">
{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{end_parameter}
...
{end_invoke}
{invoke} name="$TOOL_NAME2">
...
{end_invoke}
{end_calls}

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), \
you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


@dataclass(slots=True)
class _Turn:
    """One turn of the conversation, with neighbouring messages of users and tools in one."""

    role: str
    blocks: list[str]
    """Texts that are written with a blank line between them."""
    call_ids: list[str | None] = field(default_factory=list[str | None])
    """Of a user's turn, by block: the call whose result it is; None for text."""
    reasoning: str = ""
    calls: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    asks: bool = False
    """Whether someone asks for something new, so that earlier reasoning has served its purpose."""
    answered: bool = False
    """Whether an answer's header may follow it."""

    @property
    def text(self) -> str:
        return "\n\n".join(self.blocks)


class DeepseekChat(ChatFormat):
    """The chat format of V4 or V4.1. Thinking is on unless a variable turns it off.

    Variables: `thinking` or `enable_thinking` (true or false), and `reasoning_effort`: "none" turns thinking off,
    V4 knows "high" and "max", V4.1 "low", "high", "xhigh", "max" and integers from 1 to 100.
    """

    variables = frozenset({"thinking", "enable_thinking", "reasoning_effort"})
    reasoning_format = "think_tags"

    def __init__(self, tool_format: ToolFormat) -> None:
        """The format of the release that calls tools in this way."""
        self.tool_format = tool_format
        self._marks_system = tool_format == "deepseek_v41"
        self._dialect = dsml.V41 if self._marks_system else dsml.V4

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_schema: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """See ChatFormat."""
        check_variables(variables, self.variables)
        effort = self._effort(variables)
        turns = self._turns(messages)
        if tools or response_schema is not None:
            _add_to_system(turns, self._additions(tools or (), response_schema))
        keeps_from = 0 if tools else max((at for at, t in enumerate(turns) if t.asks), default=0)
        prompt = [BOS, self._opening(turns, effort)]
        for at, turn in enumerate(turns):
            thinks = effort is not None and at >= keeps_from
            prompt.append(self._written(at, turn, thinks))
            last = at + 1 == len(turns)
            if (
                add_generation_prompt
                if last
                else turn.answered and turns[at + 1].role == "assistant"
            ):
                prompt.append(ASSISTANT + (THINK if thinks else END_OF_THINK))
        return checked_unicode("".join(prompt))

    def _effort(self, variables: Mapping[str, Any]) -> str | None:
        """The line that states the effort of reasoning, which may be empty; None where there is no reasoning."""
        effort = variables.get("reasoning_effort")
        thinking = _thinking(variables)
        if thinking is not None and effort is not None and thinking == (effort == "none"):
            raise TemplateError(
                f"reasoning_effort is {effort!r}, but thinking is {str(thinking).lower()}",
                field="reasoning_effort",
                hint="give one of them",
            )
        if thinking is False or effort == "none":
            return None
        effort = "high" if effort is None else effort
        if not self._marks_system:
            if isinstance(effort, str) and effort in V4_EFFORTS:
                return V4_EFFORTS[effort]
            raise _unknown_effort(effort, [repr(name) for name in ("none", *V4_EFFORTS)])
        number = V41_EFFORTS.get(effort) if isinstance(effort, str) else effort
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= 100:
            names = [repr(name) for name in ("none", *V41_EFFORTS)]
            raise _unknown_effort(effort, [*names, "an integer from 1 to 100"])
        return (
            f"Reasoning Effort: {number} "
            "(range 1-100, the higher the value, the more thorough the reasoning)\n\n"
        )

    def _turns(self, messages: Sequence[Mapping[str, Any]]) -> list[_Turn]:
        turns: list[_Turn] = []
        for at, message in enumerate(messages):
            role, text = _role(at, message), _text(at, message)
            if role not in ("user", "tool"):
                asks = role == "developer" or (role == "system" and at > 0 and self._marks_system)
                turn = _Turn(role, [text], asks=asks, answered=asks)
                if role == "assistant":
                    turn.reasoning = str(message.get("reasoning_content") or "")
                    turn.calls = _calls(at, message)
                turns.append(turn)
                continue
            if not turns or turns[-1].role != "user":
                turns.append(_Turn("user", [], answered=True))
            is_result = role == "tool"
            turns[-1].blocks.append(f"<tool_result>{text}</tool_result>" if is_result else text)
            call_id = str(message.get("tool_call_id") or "") if is_result else None
            turns[-1].call_ids.append(call_id)
            turns[-1].asks |= not is_result
        _sort_results(turns)
        return turns

    def _opening(self, turns: list[_Turn], effort: str | None) -> str:
        if not self._marks_system:
            return effort or ""
        marked = bool(effort) or (bool(turns) and turns[0].role == "system")
        return (SYSTEM if marked else "") + (effort or "")

    def _written(self, at: int, turn: _Turn, thinks: bool) -> str:
        """A turn without the header that may follow it."""
        match turn.role:
            case "system":
                return (SYSTEM if at > 0 and self._marks_system else "") + turn.text
            case "assistant":
                reasoning = turn.reasoning + END_OF_THINK if thinks else ""
                calls = "\n\n" + dsml.write_calls(self._dialect, turn.calls) if turn.calls else ""
                return reasoning + turn.text + calls + EOS
            case _:
                return USER + turn.text

    def _additions(
        self, tools: Sequence[Mapping[str, Any]], response_schema: Mapping[str, Any] | None
    ) -> list[str]:
        """What the system's turn says besides its own text."""
        additions: list[str] = []
        if tools:
            tags = self._dialect
            schemas = [dsml.to_json(_function(at, tool)) for at, tool in enumerate(tools)]
            additions.append(
                TOOLS.format(
                    calls=tags.tag(tags.calls),
                    end_calls=tags.end(tags.calls),
                    invoke=tags.tag("invoke").removesuffix(">"),
                    end_invoke=tags.end("invoke"),
                    parameter=tags.tag("parameter").removesuffix(">"),
                    end_parameter=tags.end("parameter"),
                    schemas="\n".join(schemas),
                )
            )
        if response_schema is not None:
            additions.append(RESPONSE_SCHEMA + dsml.to_json(response_schema))
        return additions


def _add_to_system(turns: list[_Turn], additions: list[str]) -> None:
    """Say it in the conversation's first turn, if that is a system's or developer's, else in one before it."""
    if not turns or turns[0].role not in ("system", "developer"):
        turns.insert(0, _Turn("system", [""]))
    turns[0].blocks += additions


def _sort_results(turns: list[_Turn]) -> None:
    """Bring results of a user's turn into the order of the calls before it; text stays where it is."""
    order: dict[str | None, int] = {}
    for turn in turns:
        if turn.calls:
            order = {str(call.get("id")): at for at, call in enumerate(turn.calls)}
        places = [at for at, call_id in enumerate(turn.call_ids) if call_id is not None]
        by_call = sorted(places, key=lambda at: order.get(turn.call_ids[at], len(order)))
        results = [turn.blocks[at] for at in by_call]
        for place, result in zip(places, results, strict=True):
            turn.blocks[place] = result


def _thinking(variables: Mapping[str, Any]) -> bool | None:
    """What `thinking` and `enable_thinking` say, which mean the same."""
    given: bool | None = None
    for name in ("thinking", "enable_thinking"):
        value = variables.get(name)
        if value is None:
            continue
        if not isinstance(value, bool) or given == (not value):
            raise TemplateError(
                f"{name} is {value!r}; it must be true or false, and the same under both its names",
                field="chat_template_kwargs",
            )
        given = value
    return given


def _unknown_effort(effort: Any, known: list[str]) -> TemplateError:
    return TemplateError(
        f"reasoning_effort is {effort!r}; this model takes {', '.join(known)}",
        field="reasoning_effort",
    )


def _role(at: int, message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if role not in ROLES:
        raise TemplateError(
            f"messages[{at}].role is {role!r}; this model knows {', '.join(ROLES)}",
            field="messages",
        )
    return role


def _text(at: int, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n\n".join(part_texts(at, cast("list[Any]", content)))
    if content is not None and not isinstance(content, str):
        raise TemplateError(
            f"messages[{at}].content is {content!r}; it must be text", field="messages"
        )
    return content or ""


def _calls(at: int, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls: list[Any] = list(message.get("tool_calls") or ())
    for index, call in enumerate(calls):
        if "name" not in _fields(_fields(call).get("function")):
            raise TemplateError(
                f"messages[{at}].tool_calls[{index}] has no function with a name", field="messages"
            )
    return calls


def _function(at: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = _fields(tool.get("function"))
    if not function:
        raise TemplateError(f"tools[{at}] has no function; it is {tool!r:.200}", field="tools")
    return function


def _fields(value: Any) -> dict[str, Any]:
    """An object as it is, and anything else as one without fields."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
