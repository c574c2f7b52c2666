"""How text becomes token ids and back, with the ids a model treats specially.

A thin, typed face over `tokenizers.Tokenizer`. What it adds are the true bytes of a token: vocabularies
spell bytes in an alphabet of their own, and a token may be only a part of a character.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from tokamak.errors import RequestError

WORD_MARK = "\u2581"
"""What SentencePiece vocabularies write for a blank."""


class Tokenizer:
    """A vocabulary with its rules; safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        vocab_tokens: int | None = None,
    ) -> None:
        """Wrap `backend`; `vocab_tokens` defaults to one more than its largest id."""
        self.backend = backend
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        if vocab_tokens is None:
            vocab_tokens = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_tokens = vocab_tokens
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_text: dict[int, str] = {i: token.content for i, token in added.items()}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text; `add_special_tokens` lets the vocabulary's own rule add BOS.

        Raises:
            RequestError: the text holds half of a surrogate pair, which no encoding can represent.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as refused:
            raise _not_unicode(text) from refused

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a sequence; bytes that make no character become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def is_special(self, text: str) -> bool:
        """Whether the text is one token that `skip_special_tokens` leaves out."""
        token_id = self.backend.token_to_id(text)
        return token_id is not None and token_id in self.special_ids

    def token_text(self, token_id: int) -> str:
        """One token as readable text; U+FFFD stands for bytes that are part of a character.

        Ids without a token, such as padding rows of an embedding, are empty.
        """
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to the text. Special tokens give their name as UTF-8."""
        if token_id in self._added_text:
            return self._added_text[token_id].encode()
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.spells_bytes:
            values = [_BYTE_OF.get(character) for character in piece]
            return (
                bytes(v for v in values if v is not None) if None not in values else piece.encode()
            )
        byte = byte_fallback_value(piece)
        if byte is not None and self.falls_back_to_bytes:
            return bytes([byte])
        return piece.replace(WORD_MARK, " ").encode()

    def to_json(self) -> str:
        """The whole tokenizer in the `tokenizer.json` format."""
        return self.backend.to_str()

    @cached_property
    def spells_bytes(self) -> bool:
        """Whether pieces are written in the byte alphabet of GPT-2 (byte-level BPE)."""
        return "ByteLevel" in self._decoder_kinds

    @cached_property
    def falls_back_to_bytes(self) -> bool:
        """Whether pieces `<0x00>` to `<0xFF>` stand for single bytes."""
        return "ByteFallback" in self._decoder_kinds

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of the byte pieces `<0x00>` to `<0xFF>`; empty where they have no such meaning."""
        if not self.falls_back_to_bytes:
            return frozenset()
        ids = (self.backend.token_to_id(f"<0x{value:02X}>") for value in range(256))
        return frozenset(i for i in ids if i is not None)

    @cached_property
    def _decoder_kinds(self) -> frozenset[str]:
        decoder = self.backend.decoder
        if decoder is None:
            return frozenset()
        state: dict[str, Any] = json.loads(decoder.__getstate__())
        parts: list[dict[str, Any]] = state.get("decoders") or [state]
        return frozenset(str(part["type"]) for part in parts)


def _not_unicode(text: str) -> RequestError:
    """What is wrong with a text that cannot be encoded: it holds half of a surrogate pair."""
    at = next(at for at, character in enumerate(text) if 0xD800 <= ord(character) < 0xE000)
    return RequestError(
        f"the text holds U+{ord(text[at]):04X} at character {at}, half of a surrogate pair; text must "
        "be valid Unicode",
        field="prompt",
    )


def byte_fallback_value(piece: str) -> int | None:
    """The byte a piece such as `<0x0A>` stands for, or None."""
    if len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    digits = piece[3:5]
    return int(digits, 16) if all(c in "0123456789ABCDEFabcdef" for c in digits) else None


def byte_alphabet() -> tuple[str, ...]:
    """The character byte-level vocabularies write for each byte.

    Printable Latin-1 characters stand for themselves; the other 68 bytes are numbered from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256))
    return tuple(chr(b) if b in printable else chr(256 + next(others)) for b in range(256))


_BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}
