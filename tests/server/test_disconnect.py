"""Does everything stop at once when a client leaves, wherever its request is?"""

from __future__ import annotations

import json
import socket
import time

import pytest

from tests.support.live_server import eventually, serving
from tests.support.scripted_engine import ScriptedCore

LONG = {"max_tokens": 2000, "ignore_eos": True}


def send(server, path, body):
    """Open a connection of our own and send a request, without reading."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def chat_body(**fields):
    return {"messages": [{"role": "user", "content": "Hi"}], **LONG, **fields}


def idle(server):
    """Whether the engine holds nothing."""
    stats = server.engine.core.stats()
    return (
        stats.running_requests == 0
        and stats.waiting_requests == 0
        and stats.free_blocks == stats.total_blocks
        and server.engine.health().unfinished_requests == 0
    )


@pytest.mark.parametrize(
    ("path", "body", "siblings"),
    [
        ("/v1/chat/completions", chat_body(stream=True), 1),
        ("/v1/chat/completions", chat_body(stream=True, n=3, temperature=1), 3),
        ("/v1/chat/completions", chat_body(), 1),
        ("/v1/chat/completions", chat_body(n=3, temperature=1), 3),
        ("/v1/completions", {"prompt": "abc", "stream": True, **LONG}, 1),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True, **LONG}, 2),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, **LONG}, 4),
    ],
    ids=["stream", "stream n", "whole", "whole n", "completion", "prompts", "whole prompts n"],
)
def test_leaving_aborts_every_sibling_at_once(path, body, siblings):
    with serving(token_s=0.005) as server:
        connections = [send(server, path, body) for _ in range(4)]
        eventually(lambda: server.engine.core.stats().generated_tokens > 8 * siblings)
        for connection in connections:
            connection.close()

        left_s = time.monotonic()
        eventually(lambda: idle(server), within_s=1.0)
        took_s = time.monotonic() - left_s

        assert took_s < 1.0
        assert len(server.engine.core.aborted) == 4 * siblings
        assert server.engine.core.unknown_aborts == []
        assert server.chat(max_tokens=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_the_queue_takes_the_request_out_of_it(stream):
    with serving(core=ScriptedCore(max_running=1), token_s=0.005) as server:
        first = send(server, "/v1/chat/completions", chat_body(stream=True))
        eventually(lambda: server.engine.core.stats().running_requests == 1)
        queued = send(server, "/v1/chat/completions", chat_body(stream=stream))
        eventually(lambda: server.engine.core.stats().waiting_requests == 1)

        queued.close()
        eventually(lambda: server.engine.core.stats().waiting_requests == 0, within_s=1.0)

        assert server.engine.core.stats().running_requests == 1
        first.close()
        eventually(lambda: idle(server), within_s=1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_aborts(stream):
    with serving(token_s=0.3) as server:
        # A first request keeps the loop asleep between steps, as a long prefill would.
        busy = send(server, "/v1/chat/completions", chat_body(stream=True))
        eventually(lambda: server.engine.core.stats().running_requests == 1)
        early = send(server, "/v1/chat/completions", chat_body(stream=stream))
        eventually(lambda: len(server.engine.core.added) == 2)

        early.close()
        eventually(lambda: len(server.engine.core.aborted) == 1, within_s=1.0)
        busy.close()

        eventually(lambda: idle(server), within_s=1.0)


def test_leaving_while_still_sending_starts_nothing(server):
    host, port = server.url.removeprefix("http://").split(":")
    before = len(server.engine.core.added)
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"prompt": '
    )
    connection.close()

    assert server.complete(max_tokens=1).status_code == 200
    assert len(server.engine.core.added) == before + 1


def test_one_of_several_clients_leaving_leaves_the_others_alone():
    with serving(token_s=0.002) as server:
        leaver = send(server, "/v1/chat/completions", chat_body(stream=True))
        eventually(lambda: server.engine.core.stats().generated_tokens > 3)
        alone = server.complete("abc", max_tokens=50, temperature=0).json()
        leaver.close()
        together = server.complete("abc", max_tokens=50, temperature=0).json()

        assert alone["choices"] == together["choices"]


def test_finishing_normally_sends_no_abort():
    with serving() as server:
        server.chat(max_tokens=5)
        server.chat(max_tokens=5, stream=True)
        server.complete(["a", "b"], n=2, max_tokens=5)

        assert server.engine.core.aborted == []
        assert server.engine.core.unknown_aborts == []


def test_those_who_left_are_counted_as_gone():
    with serving(token_s=0.005) as server:
        connection = send(server, "/v1/chat/completions", chat_body())
        eventually(lambda: server.engine.core.stats().running_requests == 1)
        connection.close()
        eventually(lambda: idle(server), within_s=1.0)

        metrics = server.http.get("/metrics").text
        assert 'tokamak_generations_total{finish_reason="gone"} 1.0' in metrics
        assert 'route="/v1/chat/completions",status="499"' in metrics
