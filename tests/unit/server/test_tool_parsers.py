"""Do parsers find the calls in an answer, wherever its pieces end, and lose nothing of what is no call?"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamak.server.parsers.answer import TOOL_PARSERS, AnswerDelta, AnswerReader
from tokamak.text import dsml
from tokamak.text.chat_format import ToolFormat

CALLS = {
    "one": [("get_weather", {"city": "Köln", "days": 3, "fine": True})],
    "no arguments": [("now", {})],
    "two": [
        ("a.b", {"x": [1, {"y": None}]}),
        ("c", {"text": 'a "quoted"\nline \\ </tool> <｜ 你'}),
    ],
    "empty text": [("f", {"text": ""})],
}

V41_OPEN, V41_END = "<｜DSML｜ calls>", "</｜DSML｜ calls>"


def block(tool_format: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """An answer's calls as the model writes them."""
    if tool_format == "hermes":
        texts = [
            json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            for name, arguments in calls
        ]
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    dialect = dsml.V41 if tool_format == "deepseek_v41" else dsml.V4
    functions = [{"function": {"name": n, "arguments": a}} for n, a in calls]
    return dsml.write_calls(dialect, functions)


def read(
    tool_format: ToolFormat, pieces: list[str], *, cut: bool = False, parallel: bool = True
) -> tuple[str, list[tuple[str | None, str]], bool]:
    """Content, calls as (name, arguments), and whether all were complete."""
    reader = AnswerReader(tools=TOOL_PARSERS[tool_format](), parallel=parallel)
    deltas = [reader.feed(piece) for piece in pieces]
    return joined([*deltas, reader.finish(cut=cut)], reader)


def joined(
    deltas: list[AnswerDelta], reader: AnswerReader
) -> tuple[str, list[tuple[str | None, str]], bool]:
    content, names, arguments = "", {}, {}
    for delta in deltas:
        content += delta.content
        for call in delta.calls:
            assert (call.name is None) == (call.index in names)
            assert (call.id is None) == (call.name is None)
            names.setdefault(call.index, call.name)
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
    assert list(names) == list(range(len(names)))
    return content, [(names[at], arguments[at]) for at in names], reader.called


@pytest.mark.parametrize("tool_format", TOOL_PARSERS)
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("by", [1, 2, 7, 1000])
def test_calls_are_read_back_as_they_were_written(tool_format, calls, by):
    text = "Let me see.\n\n" + block(tool_format, calls)

    content, found, called = read(
        tool_format, [text[at : at + by] for at in range(0, len(text), by)]
    )

    assert content == "Let me see."
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert called


@pytest.mark.parametrize("tool_format", TOOL_PARSERS)
def test_text_around_calls_is_content(tool_format):
    one = block(tool_format, CALLS["one"])

    content, found, called = read(tool_format, [f"a\n<b\n\n{one}\n\nc\n{one}\n\n"])

    assert content == "a\n<b\n\nc"
    assert len(found) == 2
    assert called


@pytest.mark.parametrize("tool_format", TOOL_PARSERS)
def test_only_the_first_call_is_handed_on_where_calls_are_not_parallel(tool_format):
    _, found, called = read(tool_format, [block(tool_format, CALLS["two"])], parallel=False)

    assert [name for name, _ in found] == ["a.b"]
    assert called


def test_text_values_arrive_while_they_are_written():
    reader = AnswerReader(tools=TOOL_PARSERS["deepseek_v41"]())
    reader.feed(
        f'{V41_OPEN}\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="t" string="true">'
    )

    assert reader.feed("once ").calls[0].arguments == "once "
    assert reader.feed('"upon"<').calls[0].arguments == '\\"upon\\"'


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ("3", {"v": 3}),
        ('{"a": [1]}', {"v": {"a": [1]}}),
        (" 1\n", {"v": 1}),
        ("Köln", {"v": "Köln"}),
        ("NaN", {"v": "NaN"}),
        ("", {"v": ""}),
        ("[" * 20_000, {"v": "[" * 20_000}),
    ],
    ids=lambda value: str(value)[:10],
)
def test_a_value_that_is_no_json_is_text(value, arguments):
    text = block("deepseek_v4", [("f", {"v": 7})]).replace(">7<", f">{value}<")

    _, [(_, found)], called = read("deepseek_v4", [text])

    assert json.loads(found) == arguments
    assert called


MALFORMED = {
    "deepseek_v41": [
        f"{V41_OPEN}no tags{V41_END}",
        f'{V41_OPEN}\n<｜DSML｜invoke name="f">\n{V41_END}',
        f'{V41_OPEN}\n<｜DSML｜ invoke name="">\n{V41_END}',
        f'{V41_OPEN}\n<｜DSML｜ invoke id="f">\n{V41_END}',
        f'{V41_OPEN}\n<｜DSML｜ invoke name="f',
        "<｜DSML｜ call",
        "<｜DSML｜ callso>",
        block("deepseek_v4", CALLS["one"]),
        V41_OPEN * 3,
    ],
    "hermes": [
        "<tool_call>\nno json\n</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "argu',
        "<tool_call>" + "[" * 20_000 + "</tool_call>",
        "<tool_cal",
    ],
}


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [(name, text) for name, texts in MALFORMED.items() for text in texts],
    ids=lambda value: value[:40],
)
def test_what_is_no_call_is_content_as_it_stands(tool_format, text):
    assert read(tool_format, [f"a\n{text}\nb"]) == (f"a\n{text}\nb", [], False)


@pytest.mark.parametrize("inside", ["oops", '<｜DSML｜ parameter name="city" string="true">x'])
def test_a_call_that_breaks_stays_without_an_end_and_the_rest_is_content(inside):
    whole = block("deepseek_v41", [("f", {"city": "Köln"})])
    at = whole.index("\n</｜DSML｜ invoke>")

    content, found, called = read("deepseek_v41", [whole[:at] + inside + whole[at:]])

    assert content == inside + whole[at:]
    assert found == [("f", '{"city": "Köln"')]
    assert not called


@pytest.mark.parametrize("tool_format", TOOL_PARSERS)
def test_an_answer_cut_for_length_shows_no_markup_and_no_complete_call(tool_format):
    text = "Look.\n\n" + block(tool_format, CALLS["one"])
    complete = json.dumps(CALLS["one"][0][1], ensure_ascii=False)

    for end in range(len(text) - len("</tool_call>")):
        content, found, called = read(tool_format, [text[:end]], cut=True)

        assert "｜" not in content, text[:end]
        assert "<tool_call>" not in content
        assert text.startswith(content)
        for name, arguments in found:
            assert name == "get_weather"
            assert called or complete.startswith(arguments.rstrip("}"))


WORDS = st.sampled_from(
    [
        *["\n", "\n\n", " ", "<", "</", "text", "你", '"', "{", "}", "3"],
        *["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', '{"name": "f"'],
        *[V41_OPEN, V41_END, "<｜DSML｜", ' invoke name="f">', "</｜DSML｜ invoke>"],
        *['<｜DSML｜ invoke name="f">', "</｜DSML｜ parameter>", "<think>", "</think>"],
        *[
            '<｜DSML｜ parameter name="a" string="true">',
            '<｜DSML｜ parameter name="b" string="false">',
        ],
    ]
)


@given(
    words=st.lists(WORDS, max_size=30),
    cuts=st.lists(st.integers(0, 400), max_size=40),
    tool_format=st.sampled_from(["deepseek_v41", "hermes"]),
    cut=st.booleans(),
)
def test_where_pieces_end_changes_nothing(words, cuts, tool_format, cut):
    text = "".join(words)
    ends = sorted({min(at, len(text)) for at in cuts} | {0, len(text)})
    pieces = [text[begin:end] for begin, end in pairwise(ends)]

    whole = read(tool_format, [text], cut=cut)

    assert read(tool_format, pieces, cut=cut) == whole
    assert read(tool_format, list(text), cut=cut) == whole


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["f", "a.b-c"]),
            st.dictionaries(
                st.text("abc_é", min_size=1, max_size=8),
                st.text(max_size=30)
                | st.integers()
                | st.booleans()
                | st.lists(st.text("ab<>", max_size=8), max_size=4),
                max_size=4,
            ),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_arguments_survive(calls):
    for tool_format in ("deepseek_v4", "deepseek_v41"):
        _, found, called = read(tool_format, list(block(tool_format, calls)))

        assert called
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls
