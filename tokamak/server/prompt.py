"""How do a chat's messages become the prompt?

In: messages and template fields as a client sent them. Out: the text that the chat template makes of them, which
carries its own special tokens. Without a generation prompt, or with the last message left open to be continued.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokamak.errors import RequestError, TemplateError
from tokamak.server.protocol.chat import ChatTemplateFields, Message, template_messages
from tokamak.text.chat_format import ChatFormat

OWN_NAMES = ("messages", "tools", "add_generation_prompt", "self")
"""What the template gets from other fields of the body."""


def chat_prompt(
    template: ChatFormat | None, messages: Sequence[Message], fields: ChatTemplateFields
) -> str:
    """The prompt for `messages`.

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
    variables = fields.chat_template_kwargs or {}
    for name in OWN_NAMES:
        if name in variables:
            raise RequestError(
                f"chat_template_kwargs names {name!r}, which has a field of its own",
                field="chat_template_kwargs",
            )
    made = template_messages(messages)
    if not fields.continue_final_message:
        begin = fields.add_generation_prompt is not False
        return template.render(made, add_generation_prompt=begin, **variables)
    if fields.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both true; an answer either begins"
            " or goes on",
            field="continue_final_message",
        )
    return _left_open(template.render(made, add_generation_prompt=False, **variables), messages[-1])


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
