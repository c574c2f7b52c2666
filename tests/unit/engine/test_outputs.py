"""Do text, ids, logprobs and usage of a sibling's events always describe the same cut?"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scripted_engine import EOS_ID, byte_tokenizer, scripted_logprobs
from tokamak.core.generation import GenerationEvent
from tokamak.core.request import FinishReason, SamplingParams
from tokamak.engine.messages import RequestUpdate
from tokamak.engine.outputs import OutputStream
from tokamak.errors import EngineError, OverloadedError, RequestError

TOKENIZER = byte_tokenizer()
PROMPT_IDS = [72, 105]
TEXT = "Repeat exactly: ďábel 你好 👩‍🚀 𝄞 ﷽"


@dataclass
class Joined:
    """Everything a client has after the last event."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple
    last: GenerationEvent
    events: list[GenerationEvent]
    stream: OutputStream


def run(
    chunks: list[list[int]],
    params: SamplingParams | None = None,
    reason: FinishReason = FinishReason.LENGTH,
    stop_id: int | None = None,
) -> Joined:
    """Feed chunks of ids, the last with the reason, as an engine sends them."""
    params = params or SamplingParams()
    stream = OutputStream(TOKENIZER, params, PROMPT_IDS, sibling=0, arrived_s=1.0)
    events: list[GenerationEvent] = []
    for at, ids in enumerate(chunks):
        ending = at == len(chunks) - 1
        update = RequestUpdate(
            request_id="r:0",
            token_ids=ids,
            logprobs=[]
            if params.logprobs is None
            else [scripted_logprobs(i, params.logprobs) for i in ids],
            finish_reason=reason if ending else None,
            stop_id=stop_id if ending else None,
            cached_tokens=1,
        )
        event = stream.feed(update, now_s=2.0 + at)
        if event is not None:
            events.append(event)
    return Joined(
        text="".join(event.text for event in events),
        ids=tuple(i for event in events for i in event.token_ids),
        logprobs=tuple(entry for event in events for entry in event.logprobs or ()),
        last=events[-1],
        events=events,
        stream=stream,
    )


def one_by_one(text: str) -> list[list[int]]:
    return [[byte] for byte in text.encode()]


@pytest.mark.parametrize("max_tokens", range(1, len(TEXT.encode()) + 1))
def test_a_replacement_character_is_sent_only_where_the_whole_text_ends_in_one(max_tokens):
    ids = list(TEXT.encode())[:max_tokens]

    joined = run([[i] for i in ids])

    assert joined.text == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert all("\ufffd" not in event.text for event in joined.events[:-1])
    assert joined.last.usage.completion_tokens == max_tokens
    assert joined.ids == tuple(ids)


STOPS = [
    (" 9, 10",),
    ("9",),
    ("10", "9, 10"),
    ("never-there-string-of-40-characters-xxxx",),
    ("x", "9, 11", "10, 1", "zz"),
]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_no_piece_of_a_stop_string_is_sent_and_everything_before_it_is(stops, include):
    whole = " 7, 8, 9, 10, 11, 12"

    params = SamplingParams(stop=stops, include_stop_str_in_output=include)

    joined = run(one_by_one(whole), params)

    ends = {stop: whole.find(stop) + len(stop) for stop in stops if stop in whole}
    if not ends:
        assert (joined.text, joined.last.finish_reason) == (whole, FinishReason.LENGTH)
        return
    stop = min(ends, key=lambda s: (ends[s], -len(s)))
    assert joined.text == whole[: ends[stop] - (0 if include else len(stop))]
    assert joined.last.finish_reason is FinishReason.STOP
    assert joined.last.stop_reason == stop
    assert joined.ids == tuple(whole.encode()[: ends[stop]])
    assert joined.last.usage.completion_tokens == ends[stop]


def test_text_that_cannot_begin_a_stop_is_sent_with_its_token():
    joined = run(one_by_one("abcdef"), SamplingParams(stop=("xyz",)))

    assert [event.text for event in joined.events] == ["a", "b", "c", "d", "e", "f"]


def test_no_event_is_empty_while_text_is_held_back():
    joined = run(one_by_one("xyxyxyab"), SamplingParams(stop=("xyxyxyz",)))

    assert all(event.text or event.finish_reason for event in joined.events)
    assert joined.text == "xyxyxyab"


def test_tokens_after_the_one_that_completes_a_stop_are_dropped():
    params = SamplingParams(stop=("ha ha",), logprobs=2)

    joined = run([list(b"so, ha ha ha"), list(b" ha")], params)

    assert joined.text == "so, "
    assert bytes(joined.ids) == b"so, ha ha"
    assert len(joined.logprobs) == len(joined.ids) == joined.last.usage.completion_tokens
    assert len(joined.events) == 1


def test_the_engine_is_told_of_a_stop_string_it_does_not_know_of():
    stopped = run([list(b"ab"), list(b"cd")], SamplingParams(stop=("b",)))
    ended_anyway = run([list(b"ab")], SamplingParams(stop=("b",)))

    assert stopped.stream.ended_here
    assert stopped.events[0].finish_reason is FinishReason.STOP
    assert not ended_anyway.stream.ended_here


def test_the_stop_token_is_among_the_ids_and_not_in_the_text():
    params = SamplingParams(logprobs=0, skip_special_tokens=False)

    joined = run([[65], [66, EOS_ID]], params, FinishReason.STOP, EOS_ID)

    assert joined.text == "AB"
    assert joined.ids == (65, 66, EOS_ID)
    assert joined.last.usage.completion_tokens == len(joined.logprobs) == 3
    assert (joined.last.finish_reason, joined.last.stop_reason) == (FinishReason.STOP, None)


def test_the_stop_token_is_in_the_text_when_asked_for():
    params = SamplingParams(include_stop_str_in_output=True, stop_token_ids=(33,))

    joined = run([[65], [33]], params, FinishReason.STOP, 33)

    assert joined.text == "A!"


def test_stop_strings_wait_for_min_tokens():
    joined = run(one_by_one("aXbXcX"), SamplingParams(stop=("X",), min_tokens=2))

    assert joined.text == "aXb"
    assert joined.last.usage.completion_tokens == 4


def test_a_character_cut_short_by_the_end_may_complete_a_stop():
    ids = list("é".encode())[:1]

    joined = run([[65], ids], SamplingParams(stop=("\ufffd",)))

    assert (joined.text, joined.last.finish_reason) == ("A", FinishReason.STOP)
    assert not joined.stream.ended_here


def test_each_token_has_its_own_alternatives_with_true_bytes():
    joined = run([list("aé".encode()), [98, 99]], SamplingParams(logprobs=3))

    assert [entry.chosen.token_id for entry in joined.logprobs] == [*"aé".encode(), 98, 99]
    assert [entry.chosen.token_bytes for entry in joined.logprobs[1:3]] == [b"\xc3", b"\xa9"]
    assert all(entry.top[0] == entry.chosen or entry.rank > 1 for entry in joined.logprobs)
    assert all(len(entry.top) == 3 for entry in joined.logprobs)


def test_the_first_event_has_the_prompt_and_its_logprobs():
    params = SamplingParams(prompt_logprobs=1)
    prompt_ids = [1, 2, 3, 4]
    stream = OutputStream(TOKENIZER, params, prompt_ids, sibling=0, arrived_s=0.0)
    parts = [scripted_logprobs(i, 1) for i in prompt_ids[1:]]

    early = stream.feed(RequestUpdate(request_id="r:0", prompt_logprobs=parts[:2]), 1.0)
    first = stream.feed(
        RequestUpdate(request_id="r:0", prompt_logprobs=parts[2:], token_ids=[65]), 2.0
    )
    second = stream.feed(RequestUpdate(request_id="r:0", token_ids=[66]), 3.0)

    assert early is None
    assert first.prompt_ids == tuple(prompt_ids)
    assert first.prompt_logprobs[0] is None
    assert [entry.chosen.token_id for entry in first.prompt_logprobs[1:]] == [2, 3, 4]
    assert second.prompt_ids == ()
    assert second.prompt_logprobs is None


@pytest.mark.parametrize("prompt_ids", [[7], [7, 8, 9]])
def test_a_prompt_may_be_scored_without_output(prompt_ids):
    params = SamplingParams(prompt_logprobs=0, logprobs=0, max_tokens=0)
    stream = OutputStream(TOKENIZER, params, prompt_ids, sibling=0, arrived_s=0.0)
    update = RequestUpdate(
        request_id="r:0",
        prompt_logprobs=[scripted_logprobs(i, 0) for i in prompt_ids[1:]],
        finish_reason=FinishReason.LENGTH,
    )

    event = stream.feed(update, 1.0)

    assert len(event.prompt_logprobs) == len(prompt_ids)
    assert (event.text, event.token_ids, event.logprobs) == ("", (), ())
    assert event.usage.completion_tokens == 0
    assert event.timings.first_token_s is None


def test_timings_are_those_of_the_first_and_last_token():
    joined = run([[65], [66], [67]])

    timings = joined.last.timings
    assert (timings.arrived_s, timings.first_token_s, timings.last_token_s) == (1.0, 2.0, 4.0)
    assert joined.last.usage.cached_tokens == 1


@pytest.mark.parametrize(
    ("kind", "error_class"),
    [("request", RequestError), ("overloaded", OverloadedError), ("engine", EngineError)],
)
def test_an_error_is_raised_as_the_class_it_stands_for(kind, error_class):
    stream = OutputStream(TOKENIZER, SamplingParams(), PROMPT_IDS, sibling=0, arrived_s=0.0)
    update = RequestUpdate(
        request_id="r:0",
        finish_reason=FinishReason.ERROR,
        error="no",
        error_kind=kind,
        error_field="seed",
        retry_after_s=3.0,
    )

    with pytest.raises(error_class, match="no") as raised:
        stream.feed(update, 1.0)

    assert getattr(raised.value, "retry_after_s", 3.0) == 3.0
    assert getattr(raised.value, "field", "seed") == "seed"
    assert stream.finished


@st.composite
def generations(draw):
    """A text with wide characters, stop strings likely to be in it, and a way to cut it into chunks."""
    text = draw(st.text(alphabet="abé你👩 ", max_size=30))
    stops = draw(st.lists(st.text(alphabet="abé你 ", min_size=1, max_size=4), max_size=3))
    ids = list(text.encode())
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=10))
    bounds = [0, *sorted(cuts), len(ids)]
    chunks = [ids[a:b] for a, b in pairwise(bounds)]
    params = SamplingParams(
        stop=tuple(stops),
        min_tokens=draw(st.integers(0, 4)),
        include_stop_str_in_output=draw(st.booleans()),
        logprobs=1,
    )
    return ids, chunks, params


@given(generations())
def test_any_chunking_gives_the_same_joined_events(case):
    ids, chunks, params = case

    whole = run([ids], params)
    chunked = run(chunks, params)

    assert chunked.text == whole.text
    assert chunked.ids == whole.ids
    assert chunked.logprobs == whole.logprobs
    assert chunked.last.finish_reason == whole.last.finish_reason
    assert chunked.last.stop_reason == whole.last.stop_reason
    assert chunked.last.usage == whole.last.usage
    assert len(whole.ids) == len(whole.logprobs) == whole.last.usage.completion_tokens
    if not params.stop:
        assert whole.text == bytes(ids).decode()
