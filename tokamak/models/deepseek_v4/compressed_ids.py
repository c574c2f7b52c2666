"""Which tokens do the n-gram memories of V4.1 take for the same? Those that read alike but for case, accents, blanks.

Numbers are given in the order of token ids, so they depend on the tokenizer alone.
"""

from __future__ import annotations

import re
import unicodedata

from tokamak.errors import CheckpointError
from tokamak.text.tokenizer import Tokenizer

BLANKS = re.compile(r"[ \t\r\n]+")
ONE_BLANK = "\ue000"
"""Stands for a text that is one blank while blanks are cut off at both ends."""

BROKEN = "\ufffd"
"""In texts of tokens that are part of a character."""


def compressed_ids(tokenizer: Tokenizer, *, vocab_tokens: int, expected: int) -> list[int]:
    """A number for each token id; ids without a token get that of the last one.

    Args:
        tokenizer: what the weights were trained with.
        vocab_tokens: rows of the model's embedding.
        expected: how many numbers there are, which the memories' hashes depend on.

    Raises:
        CheckpointError: the tokenizer makes another count.
    """
    numbers: dict[str, int] = {}
    found: list[int] = []
    for token_id in range(min(tokenizer.vocab_tokens, vocab_tokens)):
        key = _key(tokenizer, token_id)
        found.append(numbers.setdefault(key, len(numbers)))
    if len(numbers) != expected:
        raise CheckpointError(
            f"the tokenizer has {len(numbers)} different tokens for the n-gram memories, and "
            f"engram_compressed_vocab_size is {expected}",
            hint="use the tokenizer.json that was published with the weights",
        )
    return found + found[-1:] * (vocab_tokens - len(found))


def _key(tokenizer: Tokenizer, token_id: int) -> str:
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if BROKEN in text:
        return tokenizer.backend.id_to_token(token_id) or text
    return normalised(text) or text


def normalised(text: str) -> str:
    """A text without case, accents and kinds of blanks."""
    plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    plain = "".join(letter for letter in plain if unicodedata.category(letter) != "Mn").lower()
    plain = BLANKS.sub(" ", plain)
    if plain == " ":
        plain = ONE_BLANK
    return plain.strip().replace(ONE_BLANK, " ")
