"""How do a chat's messages become the prompt?

In: messages and template fields as a client sent them. Out: the text that the chat template makes of them, which
carries its own special tokens. Without a generation prompt, or with the last message left open to be continued.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tokamak.errors import RequestError, TemplateError
from tokamak.server.protocol.chat import ChatTemplateFields, Message, template_messages
from tokamak.text.chat_format import ChatFormat

OWN_NAMES = ("messages", "tools", "response_schema", "add_generation_prompt", "self")
"""What the template gets from other fields of the body."""


def chat_prompt(
    template: ChatFormat | None,
    messages: Sequence[Message],
    fields: ChatTemplateFields,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    response_schema: dict[str, Any] | None = None,
    constrained_by: str | None = None,
) -> str:
    """The prompt for `messages`.

    Args:
        template: the model's chat format.
        messages: the conversation.
        fields: how the client wants it rendered.
        tools: what the model may call.
        response_schema: the JSON schema its answer is held to.
        constrained_by: the field that constrains the answer's text, which leaves no room for reasoning.

    Raises:
        RequestError: the model has no template, or fields contradict each other.
        TemplateError: the template refused the messages.
    """
    if template is None:
        raise RequestError(
            "messages need a chat template, and this model has none",
            field="messages",
            hint="use /v1/completions, or start the server with chat_template",
        )
    render = partial(
        template.render,
        template_messages(messages),
        tools=tools,
        response_schema=response_schema,
        **_variables(template, fields, constrained_by),
    )
    if not fields.continue_final_message:
        return render(add_generation_prompt=fields.add_generation_prompt is not False)
    if fields.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both true; an answer either begins"
            " or goes on",
            field="continue_final_message",
        )
    return _left_open(render(add_generation_prompt=False), messages[-1])


def _variables(
    template: ChatFormat, fields: ChatTemplateFields, constrained_by: str | None
) -> dict[str, Any]:
    """The template's variables: those the client names, and what its other fields say of reasoning."""
    variables = dict(fields.chat_template_kwargs or {})
    for name in OWN_NAMES:
        if name in variables:
            raise RequestError(
                f"chat_template_kwargs names {name!r}, which has a field of its own",
                field="chat_template_kwargs",
            )
    effort = fields.reasoning_effort
    if effort is not None and "reasoning_effort" in variables:
        raise RequestError(
            "reasoning_effort is given twice, once of them in chat_template_kwargs",
            field="reasoning_effort",
        )
    if effort is not None and "reasoning_effort" in template.variables:
        variables["reasoning_effort"] = effort
    elif effort == "none" and "enable_thinking" in template.variables:
        variables.setdefault("enable_thinking", False)
    elif effort not in (None, "none"):
        raise RequestError(
            f"reasoning_effort is {effort!r}, but this model's chat template does not take it",
            field="reasoning_effort",
            hint='leave it out, or send "none"',
        )
    if constrained_by is not None and "thinking" in template.variables:
        _think_not(variables, constrained_by)
    return variables


def _think_not(variables: dict[str, Any], constrained_by: str) -> None:
    """Turn reasoning off, which a constraint on the text leaves no room for, or refuse if it is asked for."""
    asked = [name for name in ("thinking", "enable_thinking") if variables.get(name)]
    if variables.get("reasoning_effort") not in (None, "none"):
        asked.append("reasoning_effort")
    if asked:
        raise RequestError(
            f"{asked[0]} asks for reasoning, and {constrained_by} constrains the text from its beginning",
            field=constrained_by,
            hint="give one of them",
        )
    if "reasoning_effort" not in variables:
        variables["thinking"] = False


def message_text(message: Message) -> str:
    """The text of a message's content."""
    content = message.content or ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _left_open(prompt: str, last: Message) -> str:
    """The prompt up to the end of its last message's text."""
    text = message_text(last)
    # Templates may trim a message, so what is looked for has no blanks at its ends.
    at = prompt.rfind(text.strip()) if text.strip() else -1
    if at < 0:
        raise TemplateError(
            "continue_final_message is true, but the last message has no text that the prompt shows",
            field="continue_final_message",
        )
    end = at + len(text.strip())
    trailing = text[len(text.rstrip()) :]
    kept = len(trailing) if prompt.startswith(trailing, end) else 0
    return prompt[: end + kept]
