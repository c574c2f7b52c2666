"""Does a stop string end the text at the same place however it arrives, and hold back no more than it must?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamak.text.stop import StopStrings

short = st.text(alphabet="ab", min_size=1, max_size=5)
cases = st.tuples(st.lists(short, min_size=1, max_size=4), st.text(alphabet="abc", max_size=30))


def stopped(
    stops: list[str], pieces: list[str], *, include: bool = False
) -> tuple[str, str | None]:
    """All text shown, and the stop that ended it."""
    watch = StopStrings(tuple(stops), include=include)
    shown = "".join(watch.feed(piece) for piece in pieces)
    return shown + watch.finish(), watch.matched


def expected(stops: list[str], text: str, *, include: bool) -> tuple[str, str | None]:
    """The definition: the stop whose end comes first, the longer of two that end together."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


@settings(deadline=None)
@given(cases, st.booleans(), st.data())
def test_any_chunking_gives_the_same_text_and_match(case, include, data):
    stops, text = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    assert stopped(stops, pieces, include=include) == expected(stops, text, include=include)


@settings(deadline=None)
@given(cases)
def test_only_text_that_can_begin_a_stop_is_held_back(case):
    stops, text = case
    watch = StopStrings(tuple(stops), include=False)

    shown = ""
    for at, character in enumerate(text):
        shown += watch.feed(character)
        if watch.matched is not None:
            break
        held = text[len(shown) : at + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "shown", "matched"),
    [
        ([" 9, 10"], " 7, 8,", " 9, 10"),
        (["9"], " 7, 8, ", "9"),
        (["10", "9, 10"], " 7, 8, ", "9, 10"),
        (["never-there-string-of-40-characters-xxxx"], " 7, 8, 9, 10, 11", None),
        (["11", "10", "never", " 12"], " 7, 8, 9, ", "10"),
    ],
)
def test_stops_of_a_count_end_it_at_the_first_one(stops, shown, matched):
    assert stopped(stops, list(" 7, 8, 9, 10, 11")) == (shown, matched)


def test_the_stop_itself_is_shown_only_on_request():
    assert stopped(["stop"], ["go sto", "p now"], include=True) == ("go stop", "stop")
    assert stopped(["stop"], ["go sto", "p now"], include=False) == ("go ", "stop")


def test_text_that_cannot_begin_a_stop_is_shown_at_once():
    watch = StopStrings(("xyz",), include=False)

    assert watch.feed("hello x") == "hello "
    assert watch.feed("y") == ""
    assert watch.feed("!") == "xy!"


def test_nothing_is_shown_after_a_match():
    watch = StopStrings(("b",), include=False)

    assert watch.feed("abc") == "a"
    assert watch.feed("more") == ""
    assert watch.finish() == ""


def test_without_stops_all_text_passes():
    assert stopped([], ["any", "thing"]) == ("anything", None)


def test_long_repeating_stops_take_linear_time():
    watch = StopStrings(("a" * 50_000 + "b",), include=False)

    shown = "".join(watch.feed("a" * 100) for _ in range(2_000))

    assert len(shown) == 150_000
