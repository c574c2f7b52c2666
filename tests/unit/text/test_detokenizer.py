"""Is text released in finished characters only, and whole in the end, wherever it is cut?"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.vocabularies import (
    SPLIT_CHARACTERS,
    byte_level_tokenizer,
    word_mark_tokenizer,
)
from tokamak.text.detokenizer import REPLACEMENT, Detokenizer

TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    "word marks": word_mark_tokenizer(),
    "word marks without a first blank": word_mark_tokenizer(marks_start=False),
}

kinds = st.sampled_from(sorted(TOKENIZERS))


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Any ids, special ones and ones beyond the vocabulary included, often bytes of characters."""
    tokenizer = TOKENIZERS[kind]
    characters = tokenizer.encode(SPLIT_CHARACTERS, add_special_tokens=False)
    anything = st.integers(0, tokenizer.vocab_tokens + 3)
    return st.lists(st.one_of(anything, st.sampled_from(characters)), max_size=40)


def fed(kind: str, ids: list[int], *, skip: bool, prompt: list[int]) -> tuple[list[str], str]:
    """What each id released, and what was left at the end."""
    detokenizer = Detokenizer(TOKENIZERS[kind], skip_special_tokens=skip, prompt_ids=prompt)
    return [detokenizer.feed([i]) for i in ids], detokenizer.finish()


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("text", [SPLIT_CHARACTERS, "Hello\nworld\n", "  the  world ", "\ufffd a"])
def test_every_cut_of_a_text_joins_to_its_decoded_whole(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)

    for cut in range(len(ids) + 1):
        pieces, rest = fed(kind, ids[:cut], skip=True, prompt=[])

        whole = tokenizer.decode(ids[:cut], skip_special_tokens=True)
        assert "".join(pieces) + rest == whole
        if REPLACEMENT not in text:
            assert REPLACEMENT not in "".join(pieces)
        assert rest == "" or whole.endswith(rest)


@settings(deadline=None)
@given(kinds.flatmap(lambda kind: st.tuples(st.just(kind), ids_of(kind))), st.booleans())
def test_any_ids_join_to_their_decoded_whole(case, skip):
    kind, ids = case

    pieces, rest = fed(kind, ids, skip=skip, prompt=[])

    assert "".join(pieces) + rest == TOKENIZERS[kind].decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(
    kinds.flatmap(lambda kind: st.tuples(st.just(kind), ids_of(kind), ids_of(kind))), st.booleans()
)
@example(("word marks", [13], [228 + 3]), False)
def test_released_text_stays_true_whatever_comes_after(case, skip):
    kind, prompt, ids = case
    pieces, rest = fed(kind, ids, skip=skip, prompt=prompt)

    for cut in range(len(ids)):
        shorter, shorter_rest = fed(kind, ids[:cut], skip=skip, prompt=prompt)

        assert shorter == pieces[:cut]
        assert REPLACEMENT not in shorter_rest or shorter_rest.endswith(REPLACEMENT)
    assert REPLACEMENT not in rest or rest.endswith(REPLACEMENT)


@settings(deadline=None)
@given(kinds.flatmap(lambda kind: st.tuples(st.just(kind), ids_of(kind), ids_of(kind))), st.data())
def test_how_ids_are_cut_into_pieces_changes_nothing(case, data):
    kind, prompt, ids = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    pieces = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    detokenizer = Detokenizer(TOKENIZERS[kind], skip_special_tokens=True, prompt_ids=prompt)

    text = "".join(detokenizer.feed(piece) for piece in pieces)

    one_by_one, rest = fed(kind, ids, skip=True, prompt=prompt)
    assert (text, detokenizer.finish()) == ("".join(one_by_one), rest)


def test_a_blank_between_prompt_and_output_is_kept():
    tokenizer = TOKENIZERS["word marks"]
    prompt = tokenizer.encode("the", add_special_tokens=True)
    ids = tokenizer.encode("world", add_special_tokens=False)

    after_a_prompt, _ = fed("word marks", ids, skip=True, prompt=prompt)
    alone, _ = fed("word marks", ids, skip=True, prompt=[])

    assert "".join(after_a_prompt) == " world"
    assert "".join(alone) == "world"


def test_an_output_never_completes_a_character_of_the_prompt():
    tokenizer = TOKENIZERS["byte-level"]
    first, *others = [tokenizer.backend.token_to_id(c) for c in "ä½ł"]

    pieces, rest = fed("byte-level", others, skip=True, prompt=[first])

    assert "".join(pieces) + rest == tokenizer.decode(others, skip_special_tokens=True)
    assert set("".join(pieces) + rest) == {REPLACEMENT}


def test_a_cut_inside_a_character_shows_only_at_the_very_end():
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("ok 👩", add_special_tokens=False)[:-1]

    pieces, rest = fed("byte-level", ids, skip=True, prompt=[])

    assert "".join(pieces) == "ok "
    assert rest == REPLACEMENT


def test_finishing_twice_gives_the_rest_once():
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    detokenizer.feed(tokenizer.encode("👩", add_special_tokens=False)[:-1])

    assert detokenizer.finish() == REPLACEMENT
    assert detokenizer.finish() == ""
