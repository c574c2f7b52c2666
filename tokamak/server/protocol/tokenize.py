"""What do clients send to /tokenize and /detokenize, and what do they get back?"""

from __future__ import annotations

import msgspec

from tokamak.errors import RequestError
from tokamak.server.protocol.chat import ChatTemplateFields, Messages
from tokamak.server.protocol.common import Body, Items


class TokenizeRequest(ChatTemplateFields):
    """A text, or messages that the chat template makes into one."""

    model: str | None = None
    messages: Messages | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Let the tokenizer add its own; on for a text, off for messages unless said otherwise."""
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Refuse a body with both, or neither."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError(
                "prompt and messages are "
                + ("both missing" if self.prompt is None else "both given")
                + "; /tokenize takes one of them",
                field="prompt",
            )
        if self.prompt is not None:
            for name in ChatTemplateFields.model_fields:
                if getattr(self, name) is not None:
                    raise RequestError(
                        f"{name} is given with prompt; it shapes messages only", field=name
                    )


class DetokenizeRequest(Body):
    """Token ids to be made into text."""

    model: str | None = None
    tokens: Items[int]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """The text of ids, special tokens included."""

    prompt: str
