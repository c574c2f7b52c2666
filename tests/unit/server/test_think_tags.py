"""Is reasoning told from the answer, whoever opened it and wherever pieces end?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from tokamak.server.parsers.answer import AnswerReader, reads_special_tokens
from tokamak.server.parsers.reasoning.think_tags import ThinkTags
from tokamak.text.tokenizer import Tokenizer


def read(prompt: str, pieces: list[str], *, lines: bool) -> tuple[str, str]:
    """Reasoning and content."""
    reader = AnswerReader(ThinkTags(prompt, lines=lines))
    deltas = [reader.feed(piece) for piece in pieces]
    deltas.append(reader.finish(cut=False))
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)


@pytest.mark.parametrize("by", [1, 3, 100])
@pytest.mark.parametrize(
    ("prompt", "lines", "text", "reasoning", "content"),
    [
        ("…<think>", False, "Hm.\n</think>\nYes.", "Hm.\n", "\nYes."),
        ("…<think>", False, "</think>Yes.", "", "Yes."),
        ("…<think>", False, "Hm, <b> and </thin", "Hm, <b> and </thin", ""),
        ("…<think>\n", True, "Hm.\n\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        ("…</think>", False, "<think> is a tag.", "", "<think> is a tag."),
        ("…</think>\n\n", True, "Yes.", "", "Yes."),
        ("…assistant\n", True, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("…assistant\n", True, "\n<think>Hm", "Hm", ""),
        ("…assistant\n", True, "Yes <think>no</think>.", "", "Yes <think>no</think>."),
        ("…assistant\n", True, "<thinker>", "", "<thinker>"),
        ("…assistant\n", True, "\n<thi", "", "\n<thi"),
        ("…<think>", False, "a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_an_answer_is_divided(prompt, lines, text, reasoning, content, by):
    pieces = [text[at : at + by] for at in range(0, len(text), by)]

    assert read(prompt, pieces, lines=lines) == (reasoning, content)


@given(
    words=st.lists(st.sampled_from(["<think>", "</think>", "<", "/th", "\n", "a ", "ink>"])),
    prompt=st.sampled_from(["x", "x<think>", "x</think>", "x<think>\n"]),
    lines=st.booleans(),
    by=st.integers(1, 9),
)
def test_where_pieces_end_changes_nothing(words, prompt, lines, by):
    text = "".join(words)

    pieces = [text[at : at + by] for at in range(0, len(text), by)]

    assert read(prompt, pieces, lines=lines) == read(prompt, [text], lines=lines)


def test_text_that_cannot_be_a_tag_is_not_held_back():
    reader = AnswerReader(ThinkTags("<think>", lines=False))

    assert reader.feed("I think").reasoning == "I think"
    assert reader.feed(" a < b").reasoning == " a < b"


@pytest.mark.parametrize(("special", "reads"), [(True, True), (False, False)])
def test_tags_that_are_special_tokens_must_stay_in_the_text(special, reads):
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.add_tokens([AddedToken("</think>", special=special)])
    tokenizer = Tokenizer(backend, bos_id=None, eos_ids=())

    assert reads_special_tokens(tokenizer, "think_tags", None) == reads
    assert not reads_special_tokens(tokenizer, None, "hermes")
