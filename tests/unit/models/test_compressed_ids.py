"""Which tokens count as the same for n-gram memories, and does another tokenizer show?"""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from tokamak.errors import CheckpointError
from tokamak.models.deepseek_v4.compressed_ids import compressed_ids, normalised
from tokamak.text.tokenizer import Tokenizer


def a_tokenizer(*words: str) -> Tokenizer:
    vocab = {word: at for at, word in enumerate(words)}
    return Tokenizer(Backend(WordLevel(vocab, unk_token=words[0])), bos_id=None, eos_ids=())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Caf\u00e9", "cafe"),
        (" The ", "the"),
        ("\t \n", " "),
        ("a \r\n b", "a b"),
        ("\ufb01ne", "fine"),
        ("", ""),
        ("\u0301", ""),
    ],
)
def test_case_accents_and_kinds_of_blanks_are_dropped(text, expected):
    assert normalised(text) == expected


def test_numbers_are_given_in_the_order_of_token_ids():
    tokenizer = a_tokenizer("The", "cat", "the", " ", "CAT", "\n", "\u0301")

    found = compressed_ids(tokenizer, vocab_tokens=9, expected=4)

    # A lone accent is nothing without it, and counts as itself; ids without a token are like the last.
    assert found == [0, 1, 0, 2, 1, 2, 3, 3, 3]


def test_another_tokenizer_is_refused():
    with pytest.raises(
        CheckpointError, match=r"2 different tokens .* engram_compressed_vocab_size is 3"
    ):
        compressed_ids(a_tokenizer("a", "b", "A"), vocab_tokens=3, expected=3)
