"""Does a tokenizer give text back, name its special ids and know every token's bytes?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.vocabularies import (
    SPLIT_CHARACTERS,
    byte_level_tokenizer,
    word_mark_tokenizer,
)
from tokamak.errors import RequestError
from tokamak.text.tokenizer import byte_alphabet

BYTE_LEVEL = byte_level_tokenizer()
WORD_MARKS = word_mark_tokenizer()


@settings(deadline=None)
@given(st.text())
def test_byte_level_text_comes_back_from_its_ids(text):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)

    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text


@settings(deadline=None)
@given(st.text(alphabet="the world Hello ďábel 你👩\n", min_size=1))
def test_the_bytes_of_tokens_joined_are_the_text(text):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)

    joined = b"".join(BYTE_LEVEL.token_bytes(i) for i in ids)

    assert joined == text.encode()


@settings(deadline=None)
@given(st.text(alphabet="the world Hello ďábel 你👩\n", min_size=1))
def test_bytes_of_word_mark_tokens_joined_are_the_text_after_the_first_blank(text):
    ids = WORD_MARKS.encode(text, add_special_tokens=False)

    joined = b"".join(WORD_MARKS.token_bytes(i) for i in ids)

    assert joined == b" " + text.encode()


def test_byte_pieces_are_one_byte_and_have_no_text_of_their_own():
    token_id = WORD_MARKS.backend.token_to_id("<0xE4>")

    assert WORD_MARKS.token_bytes(token_id) == b"\xe4"
    assert WORD_MARKS.token_text(token_id) == "\ufffd"


def test_special_tokens_have_the_bytes_of_their_names():
    assert BYTE_LEVEL.token_bytes(0) == b"<|end|>"
    assert BYTE_LEVEL.token_text(0) == "<|end|>"
    assert BYTE_LEVEL.special_ids == {0, 1, 2}


def test_ids_beyond_the_vocabulary_have_no_bytes():
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.vocab_tokens + 5) == b""
    assert BYTE_LEVEL.token_text(BYTE_LEVEL.vocab_tokens + 5) == ""


def test_special_tokens_are_added_only_when_asked_for():
    assert WORD_MARKS.encode("the", add_special_tokens=True)[0] == WORD_MARKS.bos_id
    assert WORD_MARKS.encode("the", add_special_tokens=False)[0] != WORD_MARKS.bos_id


def test_special_tokens_can_be_left_out_of_text():
    ids = BYTE_LEVEL.encode("a<|end|>b", add_special_tokens=False)

    assert BYTE_LEVEL.decode(ids, skip_special_tokens=True) == "ab"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "a<|end|>b"


def test_half_a_surrogate_pair_is_refused_with_its_place():
    with pytest.raises(RequestError, match=r"U\+D83D at character 3") as refusal:
        BYTE_LEVEL.encode("abc\ud83d", add_special_tokens=False)

    assert refusal.value.field == "prompt"


def test_a_tokenizer_survives_its_json():
    again = type(BYTE_LEVEL.backend).from_str(BYTE_LEVEL.to_json())

    assert again.encode(SPLIT_CHARACTERS).ids == BYTE_LEVEL.encode(
        SPLIT_CHARACTERS, add_special_tokens=False
    )


def test_the_alphabet_has_a_character_for_every_byte():
    alphabet = byte_alphabet()

    assert len(set(alphabet)) == 256
    assert (alphabet[0], alphabet[0x20], alphabet[0x41], alphabet[0xAD]) == ("Ā", "Ġ", "A", "Ń")
