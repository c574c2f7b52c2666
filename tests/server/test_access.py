"""Who may come in, with how much, and what does every response carry?"""

from __future__ import annotations

import json
from functools import partial

import httpx
import pytest

from tests.support.live_server import serving

ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def guarded():
    with serving(
        api_keys=("first-key", "zweiter-schlüssel"),
        allowed_origins=(ORIGIN,),
        max_body_bytes=2000,
    ) as live:
        yield live


def bearer(key):
    return {"Authorization": b"Bearer " + key.encode()}


@pytest.mark.parametrize("key", ["first-key", "zweiter-schlüssel"])
def test_each_key_opens_the_api(guarded, key):
    answer = guarded.http.get("/v1/models", headers=bearer(key))

    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        {"Authorization": "Bearer"},
        bearer("first-key2"),
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/tokenize", "/openapi.json", "/debug/graphs", "/nothing"]
)
def test_without_a_key_nothing_is_answered(guarded, path, headers):
    answer = guarded.http.get(path, headers=headers)

    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/health", "/health/live", "/health/ready", "/health/progress", "/metrics", "/version"]
)
def test_probes_need_no_key(guarded, path):
    assert guarded.http.get(path).status_code == 200


def test_a_path_that_only_begins_like_an_open_one_is_closed(guarded):
    assert guarded.http.get("/healthy").status_code == 401


def test_a_browser_may_ask_from_an_allowed_origin_only(guarded):
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}

    allowed = guarded.http.options("/v1/chat/completions", headers=asked)
    other = guarded.http.options(
        "/v1/chat/completions", headers={**asked, "Origin": "https://evil.example"}
    )

    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-origin" not in other.headers


def test_errors_can_be_read_by_a_browser_too(guarded):
    answer = guarded.http.get("/v1/models", headers={"Origin": ORIGIN})

    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_an_announced_body_that_is_too_large_is_a_413(guarded):
    body = json.dumps({"prompt": "x" * 2000}).encode()

    answer = guarded.http.post("/v1/completions", content=body, headers=bearer("first-key"))

    assert answer.status_code == 413
    assert "2000" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "body_too_large"


def test_a_body_that_grows_too_large_is_a_413(guarded):
    chunks = (b"x" * 500 for _ in range(100))

    answer = guarded.http.post("/v1/completions", content=chunks, headers=bearer("first-key"))

    assert answer.status_code == 413


def test_a_body_of_just_the_limit_is_read(guarded):
    empty = len(json.dumps({"prompt": "", "max_tokens": 1}))
    body = json.dumps({"prompt": "x" * (2000 - empty), "max_tokens": 1}).encode()

    answer = guarded.http.post("/v1/completions", content=body, headers=bearer("first-key"))

    assert len(body) == 2000
    assert answer.status_code == 200


def test_a_request_keeps_the_id_it_came_with(server):
    answer = server.http.get("/version", headers={"X-Request-Id": "my-id-1"})

    assert answer.headers["x-request-id"] == "my-id-1"


@pytest.mark.parametrize("given", [None, b"", b"x" * 200, b"caf\xc3\xa9"])
def test_a_request_without_a_usable_id_gets_one(server, given):
    headers = {} if given is None else {"X-Request-Id": given}

    ids = {server.http.get("/version", headers=headers).headers["x-request-id"] for _ in range(2)}

    assert len(ids) == 2
    assert all(len(one) == 32 for one in ids)


def test_errors_and_streams_carry_the_id_as_well(server):
    headers = {"X-Request-Id": "abc"}
    missing = server.http.get("/nothing", headers=headers)
    stream = server.http.post(
        "/v1/completions", json={"prompt": "a", "stream": True}, headers=headers
    )

    assert missing.headers["x-request-id"] == "abc"
    assert stream.headers["x-request-id"] == "abc"
    assert stream.headers["content-type"].startswith("text/event-stream")


def test_an_unexpected_exception_is_a_500_with_a_body_and_a_log_line(caplog):
    with serving() as own:

        def fail(*_: object, **__: object) -> str:
            raise ZeroDivisionError("secret detail")

        own.engine.tokenizer.encode = fail
        headers = {"X-Request-Id": "trace-me"}
        answer = own.http.post("/tokenize", json={"prompt": "a"}, headers=headers)
        after = own.complete([97], max_tokens=1)

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert after.status_code == 200
    assert any("trace-me" in record.getMessage() for record in caplog.records)


def test_many_clients_at_once_all_get_their_own_answer(server):
    prompts = [chr(97 + at) * (at + 1) for at in range(16)]
    alone = [server.complete(p, max_tokens=12, temperature=0).json()["choices"] for p in prompts]

    def ask(prompt):
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=20)
        return answer.json()["choices"]

    together = [server.beside(partial(ask, prompt)) for prompt in prompts]

    assert [answer.result() for answer in together] == alone
