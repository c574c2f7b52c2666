"""Which text is finished, given the token ids so far.

A character may be spread over several tokens, so text is released only once no later token can change
it. Released text joined with `finish()` is the decoded whole, wherever the sequence is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from tokamak.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"

CONTEXT_TOKENS = 8
"""Prompt tokens decoded with the output, so that a leading blank is seen as one between words."""


class Detokenizer:
    """The text of one generation as it grows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """Begin after `prompt_ids`; with none, the output is decoded as the start of a text."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._byte_ids = tokenizer.byte_ids
        self._context = self._whole_context(prompt_ids)
        self._ids: list[int] = []
        self._pending: list[int] = []
        self._released_characters = 0
        self._stream = DecodeStream(
            ids=list(self._context), skip_special_tokens=skip_special_tokens
        )

    def feed(self, ids: Sequence[int]) -> str:
        """Take more tokens; return the text they finish."""
        self._ids += ids
        text = ""
        for token_id in ids:
            self._pending.append(token_id)
            # A run of byte tokens is decoded as one: if it ends inside a character, all of its bytes
            # become U+FFFD. So nothing of a run is final before the run is over.
            if not self._leaves_run_open(token_id):
                text += self._stream.step(self._tokenizer.backend, self._pending) or ""
                self._pending.clear()
        self._released_characters += len(text)
        return text

    def finish(self) -> str:
        """The text not yet released. U+FFFD is in it only if the whole text ends inside a character."""
        whole = self._decode(self._context + self._ids)[len(self._decode(self._context)) :]
        rest = whole[self._released_characters :]
        self._released_characters += len(rest)
        return rest

    def _leaves_run_open(self, token_id: int) -> bool:
        """Whether a run of byte tokens may go on after this token: it is a byte, or has no text."""
        if not self._byte_ids:
            return False
        if token_id in self._byte_ids or (self._skip and token_id in self._tokenizer.special_ids):
            return True
        return self._tokenizer.backend.id_to_token(token_id) is None

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _whole_context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The end of the prompt, cut where characters begin and end; empty if it ends inside one.

        An output must not complete a character of the prompt: the prompt's text is not ours to change.
        """
        end = len(prompt_ids)
        while end and self._leaves_run_open(prompt_ids[end - 1]):
            end -= 1
        context = list(prompt_ids[max(end - CONTEXT_TOKENS, 0) : end])
        if self._decode(context).endswith(REPLACEMENT):
            return []
        while self._decode(context).startswith(REPLACEMENT):
            context.pop(0)
        return context
