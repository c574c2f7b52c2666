"""Is every wrong request a 4xx that names its field, and does the server live on?"""

from __future__ import annotations

import json
import time

import pytest

from tests.support.live_server import serving, stream_events
from tests.support.scripted_engine import VOCAB_TOKENS
from tokamak.server import generate

HI = [{"role": "user", "content": "Name a colour."}]


def schema(value):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


def nested(depth):
    made = {"type": "integer"}
    for _ in range(depth):
        made = {"type": "array", "items": made}
    return made


def brief(value):
    return str(value)[:70]


BOTH_ROUTES = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "NaN"}, "temperature"),
    ({"temperature": "Infinity"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -1e-9}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 1000}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 5000}, "stop"),
    ({"stop_token_ids": [VOCAB_TOKENS]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {str(VOCAB_TOKENS + 100): 5}}, "logit_bias"),
    ({"logit_bias": {"blue": -100}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"65": 1e9}}, "logit_bias"),
    ({"logit_bias": {"65": None}}, "logit_bias"),
    ({"logit_bias": [65]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usege": True}}, "stream_options.include_usege"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"priority": 2**64}, "priority"),
    ({"cache_salt": "x" * 1000}, "cache_salt"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": schema("{}")}, "response_format.json_schema.schema"),
    ({"response_format": schema({"type": "objekt"})}, "response_format"),
    ({"response_format": schema({"$ref": "#/missing"})}, "response_format"),
    (
        {"response_format": schema({"type": "integer", "minimum": 5, "maximum": 1})},
        "response_format",
    ),
    ({"response_format": schema({"type": "string", "pattern": "("})}, "response_format"),
    ({"response_format": schema(nested(150))}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"guided_json": {}}, "guided_json"),
]

CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "boss", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [*HI, {"role": "user", "content": [3]}]}, "messages[1].content[0]"),
    ({"messages": [{"role": "developer", "content": "Hi"}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "Hi", "mood": "sad"}]}, "messages[0].mood"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities[1]"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"echo": True}, "echo"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"unknown": 1}}, "chat_template_kwargs"),
    ({"max_token": 3}, "max_token"),
    ({"prompt": "Hi"}, "prompt"),
]

COMPLETIONS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [VOCAB_TOKENS]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a"] * 2000}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
    ({"prompt": [1] * 5000}, "prompt"),
    ({"prompt": [[1], [1] * 5000]}, "prompt"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"messages": HI}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), BOTH_ROUTES + CHAT, ids=brief)
def test_a_wrong_chat_field_is_a_400_that_names_it(server, fields, param):
    body = {"messages": HI, **fields}

    answer = server.http.post("/v1/chat/completions", json=body)

    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert server.chat(max_tokens=2).status_code == 200


@pytest.mark.parametrize(("fields", "param"), BOTH_ROUTES + COMPLETIONS, ids=brief)
def test_a_wrong_completion_field_is_a_400_that_names_it(server, fields, param):
    body = {"prompt": "abc", **fields}

    answer = server.http.post("/v1/completions", json=body)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_a_stream_is_told_before_it_begins(server, stream):
    answer = server.complete("abc", max_tokens=10**6, stream=stream)

    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


def test_an_unknown_field_comes_with_the_closest_known_name(server):
    answer = server.chat(max_completion_token=3)

    assert "did you mean max_completion_tokens?" in answer.json()["error"]["message"]


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(server):
    answer = server.complete([1] * 5000)

    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "5000" in error["message"]
    assert "4096" in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": 1' + b"0" * 10_000 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"response_format": ' + b'{"a":' * 3_000 + b"1" + b"}" * 3_001,
    ],
    ids=lambda raw: raw[:30].decode("latin-1"),
)
def test_what_is_no_proper_json_is_a_400(server, raw):
    headers = {"content-type": "application/json"}

    answer = server.http.post("/v1/completions", content=raw, headers=headers)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_null_fields_are_as_if_left_out(server):
    body = {"messages": HI, "max_tokens": 4, "temperature": 0}
    nulls = dict.fromkeys(["stop", "n", "seed", "tools", "audio", "logit_bias", "response_format"])

    plain = server.http.post("/v1/chat/completions", json=body).json()
    answer = server.http.post("/v1/chat/completions", json=body | nulls).json()

    assert answer["choices"] == plain["choices"]


def test_fields_that_cannot_change_the_answer_are_accepted(server):
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "none",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "modalities": ["text"],
        "verbosity": "medium",
    }

    answer = server.chat(max_tokens=2, **harmless)

    assert answer.status_code == 200, answer.text


def test_an_unknown_model_is_a_404(server):
    answer = server.chat(model="gpt-17")

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "scripted" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405)],
)
def test_an_unknown_route_or_method_has_an_error_body(server, method, path, status):
    answer = server.http.request(method, path)

    assert answer.status_code == status
    assert path in answer.json()["error"]["message"]


def test_bad_requests_do_not_disturb_a_running_stream():
    with serving(token_s=0.005) as server:
        alone = server.complete("story", max_tokens=200, temperature=0).json()["choices"][0]["text"]

        def read():
            with server.http.stream(
                "POST",
                "/v1/completions",
                json={"prompt": "story", "max_tokens": 200, "temperature": 0, "stream": True},
            ) as answer:
                answer.read()
                return stream_events(answer)

        got = server.beside(read)
        statuses = [
            server.chat(logit_bias={"99999": 5}).status_code,
            server.complete([99999]).status_code,
            server.chat(response_format=schema({"type": "objekt"})).status_code,
        ]

        assert statuses == [400, 400, 400]
        assert "".join(event["choices"][0]["text"] for event in got.result(20)) == alone


def test_a_good_schema_after_bad_ones_reaches_the_engine(server):
    server.chat(response_format=schema({"type": "objekt"}))
    good = {"type": "object", "properties": {"a": {"type": "integer"}}}

    answer = server.chat(response_format=schema(good), max_tokens=3)

    told = server.engine.core.added[-1].params.structured
    assert answer.status_code == 200
    assert (told.kind, json.loads(told.value)) == ("json_schema", good)


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "objekt"},
        {"$ref": "#/missing"},
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}}},
        {"type": "string", "pattern": "("},
        nested(150),
        "{}",
    ],
    ids=brief,
)
def test_a_bad_schema_is_refused_within_a_second_and_before_the_engine(server, bad):
    before = len(server.engine.core.added)

    started_s = time.monotonic()
    answer = server.chat(response_format=schema(bad))
    took_s = time.monotonic() - started_s

    assert answer.status_code == 400
    assert took_s < 1.0
    assert len(server.engine.core.added) == before


def test_a_grammar_that_takes_too_long_to_compile_is_refused(server, monkeypatch):
    monkeypatch.setattr(generate, "GRAMMAR_SECONDS", 0.05)
    monkeypatch.setattr(generate, "check_structured", lambda *_, **__: time.sleep(0.5))

    answer = server.chat(structured_outputs={"regex": "a+"})

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_grammar"
    assert "longer" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        b'"prompt": [' + b"null," * 200_000 + b"null]",
        b'"prompt": "a"' + b"".join(b', "k%d": 1' % at for at in range(100_000)),
        b'"prompt": "a", "logit_bias": {"0": 1'
        + b"".join(b', "k%d": null' % at for at in range(100_000))
        + b"}",
        b'"prompt": [' + b"1," * 400_000 + b"1]",
    ],
    ids=["items", "names", "map", "ids"],
)
def test_a_body_with_a_million_mistakes_is_refused_at_the_first(fields):
    with serving(max_body_bytes=16 << 20) as server:
        started_s = time.monotonic()
        answer = server.http.post("/v1/completions", content=b"{" + fields + b"}")
        took_s = time.monotonic() - started_s

    assert answer.status_code == 400
    assert len(answer.content) < 1000
    assert took_s < 3.0
