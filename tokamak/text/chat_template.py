"""How messages become the prompt a chat model was trained on.

Templates come with models, so they run in a sandbox; messages come from clients, so whatever goes wrong
while rendering is the client's to read, as a TemplateError. The prompt carries its own BOS where the
model wants one: encode it without special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokamak.errors import CheckpointError, TemplateError
from tokamak.text.chat_format import (
    ChatFormat,
    ReasoningFormat,
    ToolFormat,
    check_variables,
    checked_unicode,
    part_texts,
)

Message = dict[str, Any]

ContentForm = Literal["string", "parts", "either"]

_ARGUMENTS = ("messages", "tools", "add_generation_prompt")
"""Names a template gets from `render` itself."""

_PROBE = "tokamak-probe-7f3a"


class ChatTemplate(ChatFormat):
    """One model's template, compiled once; safe to share between threads."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Compile `source`.

        Raises:
            CheckpointError: the template itself is not valid.
        """
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template does not parse: {error.message} (its line {error.lineno})",
                hint="give a correct one as chat_template",
            ) from error
        self.variables = names - {*_GLOBALS, *self._tokens, *_ARGUMENTS}
        self.takes_tools = "tools" in names
        self.tool_format = _tool_format(source) if self.takes_tools else None
        self.reasoning_format = _reasoning_format(source)

    @cached_property
    def content_form(self) -> ContentForm:
        """What a message's content may be: a string, a list of parts, or either of them.

        Found out by rendering both: a template that cannot take a list fails, or shows its brackets.
        """
        takes_parts = self._shows_probe([{"type": "text", "text": _PROBE}])
        if not takes_parts:
            return "string"
        return "either" if self._shows_probe(_PROBE) else "parts"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_schema: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """See ChatFormat; `variables` go to the template by name, and a schema is not shown to the model."""
        if tools and not self.takes_tools:
            raise TemplateError(
                f"{len(tools)} tools are given, but this model's chat template knows no tools",
                field="tools",
            )
        check_variables(variables, self.variables)
        try:
            text = self._render(
                [self._prepared(at, message) for at, message in enumerate(messages)],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except TemplateError:
            raise
        # Whatever a template does with what a client sent, it is that request's error and no one else's.
        except Exception as error:
            detail = str(error) or type(error).__name__
            raise TemplateError(
                f"the chat template refused the messages: {detail}", field="messages"
            ) from error
        return checked_unicode(text)

    def _render(self, messages: list[Message], **variables: Any) -> str:
        return self._template.render(**self._tokens, messages=messages, **variables)

    def _shows_probe(self, content: str | list[dict[str, str]]) -> bool:
        """Whether a message with this content renders, with the probe's text and no Python brackets."""
        message: Message = {"role": "user", "content": content}
        try:
            text = self._render([message], tools=None, add_generation_prompt=False)
        # A template may fail in any way; that it does is the answer.
        except Exception:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text

    def _prepared(self, at: int, message: Mapping[str, Any]) -> Message:
        """A copy in the form templates expect: content as the template takes it, arguments parsed."""
        prepared = dict(message)
        content = prepared.get("content")
        if isinstance(content, list):
            texts = part_texts(at, cast("list[Any]", content))
            if self.content_form == "string":
                prepared["content"] = "\n".join(texts)
            else:
                prepared["content"] = [{"type": "text", "text": text} for text in texts]
        elif isinstance(content, str) and self.content_form == "parts":
            prepared["content"] = [{"type": "text", "text": content}]
        if prepared.get("tool_calls"):
            # Templates of this format look for tags in the text, also where there are only calls.
            if content is None and self.tool_format == "hermes":
                prepared["content"] = ""
            prepared["tool_calls"] = [_with_parsed_arguments(c) for c in prepared["tool_calls"]]
        return prepared


def _tool_format(source: str) -> ToolFormat | None:
    """How a model calls tools whose template writes earlier calls like this."""
    as_json = "<tool_call>" in source and "arguments" in source and "<function=" not in source
    return "hermes" if as_json else None


def _reasoning_format(source: str) -> ReasoningFormat | None:
    return "think_lines" if "</think>" in source else None


def _with_parsed_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object: clients send JSON text, templates want the value."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates are written for: blocks on their own line leave no line behind."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    filters = cast("dict[str, Any]", environment.filters)
    filters["tojson"] = _to_json
    known = cast("dict[str, Any]", environment.globals)
    known.update(_GLOBALS)
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what an assistant says, for training; a prompt just contains it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on: letters as they are, nothing escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(f"the chat template refused the messages: {message}", field="messages")


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


_GLOBALS: dict[str, Callable[..., Any]] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
