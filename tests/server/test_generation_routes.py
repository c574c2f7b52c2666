"""Does a client get what the completion routes promise, whole and as a stream?"""

from __future__ import annotations

import pytest

from tests.support.live_server import serving, stream_events
from tests.support.scripted_engine import EOS_ID, ScriptedCore, echoes, says

FRAME_TOKENS = len("<user.") + len("><") + len("assistant.") + len(".")
"""What the scripted template adds to one user message: names, line ends and three special tokens."""


def joined_chat(events):
    """A stream of chat chunks as (text, finish reason) by choice."""
    texts, ends = {}, {}
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["delta"].get("content", "")
            if choice["finish_reason"] is not None:
                assert index not in ends, "a choice ended twice"
                ends[index] = choice["finish_reason"]
    return texts, ends


def test_a_chat_answer_is_whole():
    with serving(says("Hello there.")) as server:
        answer = server.chat("Hi").json()

    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "scripted"
    assert choice["message"] == {"role": "assistant", "content": "Hello there.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("Hello there.") + 1
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("step_tokens", [1, 3])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1, "seed": 7},
        {"stop": ["klm"]},
        {"stop": ["klm"], "include_stop_str_in_output": True},
        {"stop": ["never-there"]},
        {"logprobs": True, "top_logprobs": 3},
        {"return_token_ids": True},
    ],
    ids=str,
)
def test_a_chat_stream_joins_to_the_whole_answer(fields, step_tokens):
    with serving(core=ScriptedCore(step_tokens=step_tokens)) as server:
        body = {"max_tokens": 40, "temperature": 0, **fields}
        whole = server.chat(**body).json()
        options = {"include_usage": True}
        events = stream_events(server.chat(stream=True, stream_options=options, **body))

    texts, ends = joined_chat(events)
    chunks = [event["choices"][0] for event in events[:-1]]
    assert [texts[c["index"]] for c in whole["choices"]] == [
        c["message"]["content"] for c in whole["choices"]
    ]
    assert [ends[c["index"]] for c in whole["choices"]] == [
        c["finish_reason"] for c in whole["choices"]
    ]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    for choice in whole["choices"]:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        entries = [e for chunk in own if chunk["logprobs"] for e in chunk["logprobs"]["content"]]
        assert entries == (choice["logprobs"]["content"] if choice["logprobs"] else [])
        ids = [i for chunk in own for i in chunk.get("token_ids", [])]
        assert ids == choice.get("token_ids", [])
        assert own[0]["delta"]["role"] == "assistant"
        assert not any("role" in chunk["delta"] for chunk in own[1:])
        assert not [c for c in own if not c["delta"].get("content") and not c["finish_reason"]]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": ["one", "two", "three"], "n": 2, "temperature": 1},
        {"prompt": [[104, 105], [106]], "echo": True},
        {"prompt": "hé 你", "echo": True, "logprobs": 2},
        {"prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": 0},
        {"logprobs": 0},
        {"stop": "lmn", "logprobs": 1, "return_token_ids": True},
    ],
    ids=str,
)
def test_a_completion_stream_joins_to_the_whole_answer(server, fields):
    body = {"prompt": "abc", "max_tokens": 30, "temperature": 0, **fields}

    whole = server.complete(**body).json()
    events = stream_events(server.complete(stream=True, **body))

    for choice in whole["choices"]:
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own][-1] == choice["finish_reason"]
        assert sum(part["finish_reason"] is not None for part in own) == 1
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [value for part in own for value in part["logprobs"][name]] == values
        ids = [i for part in own for i in part.get("token_ids", [])]
        assert ids == choice.get("token_ids", [])


def test_echoed_logprobs_describe_every_token_and_start_with_null(server):
    answer = server.complete("hé", echo=True, logprobs=1, max_tokens=1, temperature=0).json()

    choice = answer["choices"][0]
    entries = choice["logprobs"]
    assert choice["text"].startswith("hé")
    assert entries["tokens"][:3] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert len(entries["tokens"]) == 3 + 1
    assert entries["token_logprobs"][0] is None
    assert entries["top_logprobs"][0] is None
    assert all(value is not None for value in entries["token_logprobs"][1:])
    assert entries["text_offset"] == [0, 1, 2, 2]


def test_nothing_to_generate_echoes_the_prompt(server):
    prompt = [97] * 4096

    answer = server.complete(prompt, echo=True, logprobs=1, max_tokens=0).json()

    choice = answer["choices"][0]
    assert choice["text"] == "a" * 4096
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == 4096
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "generated"),
    [(126, None, 2), (127, None, 1), (126, 1, 1), (126, 2, 2), (127, 1, 1)],
)
def test_a_prompt_may_fill_the_context_but_for_the_answer(prompt_tokens, max_tokens, generated):
    with serving(core=ScriptedCore(max_model_len=128)) as server:
        # A chat without max_tokens may use all of the context; a completion is 16 tokens then.
        text = "x" * (prompt_tokens - FRAME_TOKENS)
        fields = {} if max_tokens is None else {"max_tokens": max_tokens}
        answer = server.chat(text, **fields).json()

    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == generated
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens"), [(128, 1), (129, 0), (126, 200), (129, 1)]
)
def test_what_does_not_fit_in_the_context_is_refused_alike_everywhere(prompt_tokens, max_tokens):
    with serving(core=ScriptedCore(max_model_len=128)) as server:
        answers = [
            server.complete([97] * prompt_tokens, max_tokens=max_tokens, stream=stream)
            for stream in (False, True)
        ]
        text = "x" * (prompt_tokens - FRAME_TOKENS)
        answers.append(server.chat(text, max_completion_tokens=max_tokens or 1))

    assert [answer.status_code for answer in answers] == [400, 400, 400]
    for answer in answers:
        assert str(prompt_tokens) in answer.json()["error"]["message"]
        assert "128" in answer.json()["error"]["message"]


def test_each_prompt_times_n_is_a_choice_and_prompts_are_billed_once(server):
    answer = server.complete(["a", "bcd"], n=2, max_tokens=5, temperature=1).json()

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 20


def test_siblings_differ_when_sampled_and_agree_when_greedy(server):
    sampled = server.complete("abc", n=4, max_tokens=8, temperature=1, seed=7).json()
    greedy = server.complete("abc", n=4, max_tokens=8, temperature=0).json()
    one = server.complete("abc", max_tokens=8, temperature=1, seed=7).json()

    texts = [choice["text"] for choice in sampled["choices"]]
    assert len(set(texts)) == 4
    assert texts[0] == one["choices"][0]["text"]
    assert len({choice["text"] for choice in greedy["choices"]}) == 1


def test_bytes_of_a_cut_character_are_in_the_logprobs_and_the_text_says_so_once():
    with serving(says("日本")) as server:
        for max_tokens in range(1, 8):
            body = {"max_tokens": max_tokens, "logprobs": True, "top_logprobs": 0}
            whole = server.chat(**body).json()
            events = stream_events(server.chat(stream=True, **body))

            text = whole["choices"][0]["message"]["content"]
            deltas = [event["choices"][0]["delta"].get("content", "") for event in events]
            entries = whole["choices"][0]["logprobs"]["content"]
            assert "".join(deltas) == text
            assert whole["usage"]["completion_tokens"] == max_tokens
            assert len(entries) == max_tokens
            assert bytes(b for e in entries[:6] for b in e["bytes"]) == "日本".encode()[:max_tokens]
            assert not any("�" in delta for delta in deltas[:-1])
            assert ("�" in text) == (max_tokens not in (3, 6, 7))


def test_a_stop_that_never_comes_holds_nothing_back(server):
    body = {"prompt": "abc", "max_tokens": 40, "temperature": 0}

    plain = server.complete(**body).json()["choices"][0]
    events = stream_events(
        server.complete(stream=True, stop=["never-there-string-of-40-characters-xxxx"], **body)
    )

    parts = [event["choices"][0] for event in events]
    assert "".join(part["text"] for part in parts) == plain["text"]
    assert parts[-1]["finish_reason"] == "length"
    assert all(part["text"] for part in parts[:-1])


def test_a_stop_reason_tells_the_stop_string_or_token(server):
    by_text = server.complete("abc", max_tokens=40, temperature=0, stop=["z", "pq"]).json()
    by_id = server.complete("abc", max_tokens=40, temperature=0, stop_token_ids=[122]).json()

    assert by_text["choices"][0]["finish_reason"] == "stop"
    assert by_text["choices"][0]["stop_reason"] in ("z", "pq")
    assert by_id["choices"][0]["stop_reason"] == 122


def test_a_final_message_can_be_continued_and_repeated():
    with serving(echoes) as server:
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Once upon"},
        ]
        fields = {"continue_final_message": True, "max_tokens": 5, "messages": messages}
        plain = server.http.post("/v1/chat/completions", json=fields).json()
        echoed = server.http.post("/v1/chat/completions", json={**fields, "echo": True}).json()
        prompt_ids = server.engine.core.added[-1].prompt_ids

    assert bytes(i for i in prompt_ids if i < 256).decode().endswith("assistant\nOnce upon")
    text = plain["choices"][0]["message"]["content"]
    assert echoed["choices"][0]["message"]["content"] == "Once upon" + text


def test_without_a_generation_prompt_the_prompt_ends_with_the_last_message(server):
    server.chat("Hi", add_generation_prompt=False, max_tokens=1)

    prompt_ids = server.engine.core.added[-1].prompt_ids
    assert bytes(i for i in prompt_ids if i < 256) == b"user\nHi\n"


def test_text_parts_and_earlier_answers_are_read_as_clients_send_them(server):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": "Hello",
            "refusal": None,
            "annotations": [],
            "audio": None,
        },
        {"role": "user", "content": "Bye", "name": "ann"},
    ]

    answer = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})

    prompt = bytes(i for i in server.engine.core.added[-1].prompt_ids if i < 256).decode()
    assert answer.status_code == 200, answer.text
    assert "user\nHi\n" in prompt
    assert "assistant\nHello\n" in prompt


def test_sampling_fields_reach_the_engine_as_they_were_sent(server):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 10**6,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "seed": -(2**63),
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    server.complete("abc", logit_bias={"65": -100, "66": 3}, max_tokens=3, **fields)

    told = server.engine.core.added[-1].params
    assert {name: getattr(told, name) for name in fields} == fields
    assert told.logit_bias == {65: -100.0, 66: 3.0}


def test_priority_and_salt_reach_the_engine(server):
    server.chat(priority=-3, cache_salt="mine", max_tokens=1)

    told = server.engine.core.added[-1]
    assert (told.priority, told.cache_salt) == (-3, "mine")


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"structured_outputs": {"regex": "[ab]+"}}, "regex", "[ab]+"),
        ({"structured_outputs": {"choice": ["ja", "nein"]}}, "choice", '["ja", "nein"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        (
            {"structured_outputs": {"json": {"type": "integer"}}},
            "json_schema",
            '{"type": "integer"}',
        ),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    ],
)
def test_constraints_reach_the_engine(server, fields, kind, value):
    answer = server.chat(max_tokens=1, **fields)

    told = server.engine.core.added[-1].params.structured
    assert answer.status_code == 200, answer.text
    assert (told.kind, told.value) == (kind, value)


def test_ids_are_returned_on_request(server):
    chat = server.chat(max_tokens=2, return_token_ids=True).json()
    completion = server.complete([97, 98], max_tokens=2, return_token_ids=True).json()

    assert len(chat["choices"][0]["token_ids"]) == 2
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert completion["choices"][0]["prompt_token_ids"] == [97, 98]


def test_prompt_logprobs_have_an_entry_per_prompt_token(server):
    answer = server.complete("abc", prompt_logprobs=2, max_tokens=1).json()

    entries = answer["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert [
        entry[str(token_id)]["rank"] for entry, token_id in zip(entries[1:], b"bc", strict=True)
    ] == [1, 1]
    assert entries[1]["98"]["decoded_token"] == "b"


def test_usage_so_far_comes_with_every_chunk_on_request():
    options = {"include_usage": True, "continuous_usage_stats": True}
    with serving(token_s=0.02) as server:
        events = stream_events(
            server.complete("abc", max_tokens=8, stream=True, stream_options=options)
        )

    counts = [event["usage"]["completion_tokens"] for event in events]
    lengths = [len(event["choices"][0]["text"]) for event in events[:-1]]
    assert counts[:-1] == [sum(lengths[: at + 1]) for at in range(len(lengths))]
    assert len(lengths) > 2
    assert counts[-2:] == [8, 8]


def test_a_failure_under_way_is_an_error_event_and_no_done():
    with serving(core=ScriptedCore(fail_step=4)) as server:
        answer = server.complete("abc", max_tokens=50, stream=True)

    assert answer.status_code == 200
    assert "event: error\n" in answer.text
    assert answer.text.rstrip().splitlines()[-1].startswith('data: {"error":')
    assert "[DONE]" not in answer.text


def test_a_failure_before_the_first_token_is_a_503():
    with serving(core=ScriptedCore(fail_step=1)) as server:
        answers = [server.complete("abc", stream=stream) for stream in (False, True)]
        later = server.chat()

    assert [answer.status_code for answer in answers] == [503, 503]
    assert later.status_code == 503
    assert later.json()["error"]["type"] == "server_error"


def test_a_full_queue_is_a_503_with_retry_after():
    with serving(core=ScriptedCore(max_waiting=0)) as server:
        answers = [server.complete("abc", stream=stream) for stream in (False, True)]

    assert [answer.status_code for answer in answers] == [503, 503]
    assert answers[0].headers["retry-after"] == "1"
    assert answers[0].json()["error"]["code"] == "overloaded"


def test_the_end_of_sequence_token_is_billed_and_not_shown(server):
    with serving(says("ab")) as own:
        answer = own.complete("x", return_token_ids=True).json()

    choice = answer["choices"][0]
    assert choice["text"] == "ab"
    assert choice["token_ids"] == [97, 98, EOS_ID]
    assert answer["usage"]["completion_tokens"] == 3
