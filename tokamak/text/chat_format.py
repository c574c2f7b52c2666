"""What a chat model's format is: how its conversations are written, and what its answers hold besides text.

`ChatTemplate` runs the Jinja template a model comes with; `DeepseekChat` writes the format of models that come
without one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

from tokamak.errors import TemplateError

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that are text, in the OpenAI APIs."""

ToolFormat = Literal["deepseek_v4", "deepseek_v41", "hermes"]
"""How calls stand in an answer: DeepSeek's DSML in its two spellings, or JSON in `<tool_call>`."""

ReasoningFormat = Literal["think_tags", "think_lines"]
"""Reasoning between `<think>` and `</think>`: verbatim, or with line ends at the tags that are not part of it."""


class ChatFormat(ABC):
    """One model's chat format; safe to share between threads."""

    variables: frozenset[str]
    """Names that `render` takes besides its own arguments."""
    tool_format: ToolFormat | None
    """How the model calls tools; None if it is not known to."""
    reasoning_format: ReasoningFormat | None
    """How the model sets its reasoning apart; None if it does not."""

    @abstractmethod
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_schema: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for these messages; it carries its own BOS, so encode it without special tokens.

        Args:
            messages: `role` and `content`, and what OpenAI's API adds to them.
            tools: functions the model may call, as OpenAI's API has them.
            response_schema: the JSON schema of the answer, for formats that show it to the model.
            add_generation_prompt: end where the answer begins.
            variables: the format's own, by name.

        Raises:
            TemplateError: the messages do not fit the format; tools or variables it does not know.
        """


def check_variables(variables: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise TemplateError for the first variable that is not known."""
    known = sorted(known)
    for name in variables:
        if name not in known:
            raise TemplateError(
                f"chat_template_kwargs names {name!r}, which this model's template does not take",
                field="chat_template_kwargs",
                hint=f"it takes: {', '.join(known) or 'none'}",
            )


def checked_unicode(prompt: str) -> str:
    """The prompt itself, or TemplateError where it holds half of a surrogate pair."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise TemplateError(
            f"the messages hold U+{ord(error.object[error.start]):04X}, half of a surrogate pair; "
            "text must be valid Unicode",
            field="messages",
        ) from error
    return prompt


def part_texts(at: int, parts: Sequence[Any]) -> list[str]:
    """The texts of a message's content parts; `at` is the message's index.

    Raises:
        TemplateError: a part is not text.
    """
    return [_part_text(at, part) for part in parts]


def _part_text(at: int, part: Any) -> str:
    fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    if fields.get("type") not in TEXT_PARTS or not isinstance(fields.get("text"), str):
        raise TemplateError(
            f"messages[{at}].content has a part of type {fields.get('type')!r}; this model reads only "
            'text parts, such as {"type": "text", "text": "..."}',
            field="messages",
        )
    return fields["text"]
