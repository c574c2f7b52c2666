"""How many tokens of the tiny tokenizer do n-gram memories tell apart?"""

from __future__ import annotations

from tests.support.tiny import VOCAB_TOKENS, tiny_tokenizer
from tokamak.errors import CheckpointError
from tokamak.models.deepseek_v4.compressed_ids import compressed_ids
from tokamak.text.tokenizer import Tokenizer


def numbered_tokens() -> int:
    """The count a config must state for the tiny tokenizer."""
    tokenizer = Tokenizer(tiny_tokenizer(), bos_id=None, eos_ids=())
    for expected in range(1, VOCAB_TOKENS + 1):
        try:
            compressed_ids(tokenizer, vocab_tokens=VOCAB_TOKENS, expected=expected)
        except CheckpointError:
            continue
        return expected
    raise AssertionError("no count of compressed ids fits")
