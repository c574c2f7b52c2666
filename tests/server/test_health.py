"""Do the health routes, the metrics and the small routes tell the truth?"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from tests.support.live_server import eventually, serving
from tests.support.scripted_engine import VOCAB_TOKENS, ScriptedCore
from tokamak import __version__
from tokamak.engine.messages import (
    EngineReport,
    GraphReport,
    ModeNumbers,
    SpanNumbers,
    VerdictReport,
)
from tokamak.server.routes import health
from tokamak.telemetry.metrics import ENGINE_METRICS, STEP_METRICS
from tokamak.telemetry.spans import BOUNDS_S


def statuses(server):
    return {
        name: server.http.get(f"/health/{name}").status_code
        for name in ("live", "ready", "progress")
    }


def test_an_idle_server_is_well(server):
    assert statuses(server) == {"live": 200, "ready": 200, "progress": 200}
    assert server.http.get("/health").json()["status"] == "ready"
    assert server.http.get("/health/progress").json()["token_age_s"] is None


def test_a_loading_server_is_alive_and_answers_503_to_the_rest():
    go = threading.Event()

    async def wait() -> None:
        while not go.is_set():
            await asyncio.sleep(0.01)

    with serving(before_connect=wait) as server:
        loading = statuses(server)
        chat = server.chat()
        models = server.http.get("/v1/models")
        metrics = server.http.get("/metrics")
        go.set()
        eventually(lambda: server.http.get("/health/ready").status_code == 200)
        loaded = server.chat(max_tokens=1)

    assert loading == {"live": 200, "ready": 503, "progress": 503}
    assert chat.status_code == models.status_code == 503
    assert chat.headers["retry-after"] == "1"
    assert chat.json()["error"]["code"] == "not_loaded"
    assert metrics.status_code == 200
    assert loaded.status_code == 200


def test_a_server_whose_engine_cannot_load_says_why():
    async def fail() -> None:
        raise FileNotFoundError("no such model file")

    with serving(before_connect=fail) as server:
        eventually(lambda: server.http.get("/health/live").status_code == 503)
        body = server.http.get("/health/live").json()
        chat = server.chat()

    assert body["status"] == "failed"
    assert "no such model file" in body["reason"]
    assert chat.status_code == 503


def test_a_draining_server_is_alive_but_not_ready_and_finishes_what_it_has():
    with serving(token_s=0.01) as server:
        running = server.beside(lambda: server.chat(max_tokens=60))
        eventually(lambda: server.engine.core.stats().running_requests == 1)

        drained = server.beside(lambda: server.call(lambda: server.engine.drain(5)))
        eventually(lambda: server.engine.health().draining)
        during = statuses(server)
        refused = server.chat()

    assert during == {"live": 200, "ready": 503, "progress": 200}
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert running.result().json()["usage"]["completion_tokens"] == 60
    assert drained.result() is True


def test_a_dead_engine_fails_every_probe_and_request():
    with serving(token_s=0.01) as server:
        running = server.beside(lambda: server.chat(max_tokens=500))
        eventually(lambda: server.engine.core.stats().running_requests == 1)

        server.call_soon(lambda: server.engine.die("the engine process ended with exit code -9"))
        answer = running.result()
        after = statuses(server)
        reason = server.http.get("/health/live").json()["reason"]
        chat = server.chat()

    assert answer.status_code == 503
    assert after == {"live": 503, "ready": 503, "progress": 503}
    assert "exit code -9" in reason
    assert chat.status_code == 503


def test_work_without_tokens_is_no_progress(monkeypatch):
    monkeypatch.setattr(health, "LONGEST_TOKEN_AGE_S", 0.05)
    with serving(token_s=1.0) as server:
        server.beside(lambda: server.chat(max_tokens=2))
        bodies = []

        def stuck() -> bool:
            answer = server.http.get("/health/progress")
            bodies.append(answer.json())
            return answer.status_code == 503

        eventually(stuck)

    body = bodies[-1]
    assert body["unfinished_requests"] == 1
    assert body["token_age_s"] > 0.05
    assert "no token came" in body["reason"]


def test_a_silent_loop_is_not_alive(monkeypatch):
    monkeypatch.setattr(health, "LONGEST_LOOP_AGE_S", 0.05)
    with serving(token_s=0.5) as server:
        server.beside(lambda: server.chat(max_tokens=2))
        bodies = []

        def dead() -> bool:
            answer = server.http.get("/health/live")
            bodies.append(answer.json())
            return answer.status_code == 503

        eventually(dead)

    assert "silent" in bodies[-1]["reason"]


def test_metrics_count_what_happened():
    with serving() as server:
        server.chat(max_tokens=8)
        server.complete(["ab", "cd"], max_tokens=4, stream=True)
        server.chat(temperature=-1)

        assert server.metric("tokamak_generation_tokens_total") == 16
        assert server.metric("tokamak_finished_requests_total") == 3
        assert server.metric("tokamak_running_requests") == 0
        assert server.metric("tokamak_waiting_requests") == 0
        assert server.metric("tokamak_cache_usage_ratio") == 0
        assert server.metric("tokamak_time_to_first_token_seconds_count") == 3
        assert server.metric("tokamak_inter_token_latency_seconds_count") == 7 + 3 + 3
        assert server.metric("tokamak_time_per_output_token_seconds_count") == 3
        assert server.metric("tokamak_request_generation_tokens_sum") == 16
        text = server.http.get("/metrics").text
        assert 'tokamak_generations_total{finish_reason="length"} 3.0' in text
        assert 'method="POST",route="/v1/chat/completions",status="400"} 1.0' in text


def test_every_engine_number_is_published(server):
    published = server.http.get("/metrics").text

    for row in ENGINE_METRICS:
        assert f"\n{row.name} " in published


def a_report() -> EngineReport:
    """Of an engine that has replayed 5 of 7 steps."""
    return EngineReport(
        graphs_when="on-demand",
        graphs_why="asked for",
        graph_backend="sim",
        graph_reserve_bytes=9000,
        graph_cost="saved",
        graphs=[
            GraphReport(
                name="decode",
                kind="request",
                backend="sim",
                ladder=[1, 2, 4],
                recorded=[1, 4],
                seconds=0.5,
                pool_bytes=2000,
                segments=2,
                state="partly recorded",
                recordings=3,
                replays=5,
            ),
            GraphReport(
                name="prefill",
                kind="token",
                backend="sim",
                ladder=[],
                recorded=[],
                seconds=0.0,
                pool_bytes=0,
                segments=0,
                state="off: no size is asked for",
            ),
        ],
        verdicts=[VerdictReport(graph="request", bucket=4, size=3, worst=0.0, ok=True)],
        graph_checks=4,
        graph_check_failures=1,
        modes={
            "request_graph": ModeNumbers(steps=5, scheduled_tokens=15, running_tokens=20),
            "eager": ModeNumbers(steps=2, scheduled_tokens=64, running_tokens=64),
        },
        reasons={"bucket": 5, "eager:prefill": 2},
        spans={"launch": SpanNumbers(counts=[0] * len(BOUNDS_S) + [7], sum_s=70.0)},
    )


@pytest.fixture(scope="module")
def recording():
    """A server whose engine reports graphs."""
    with serving(core=ScriptedCore(told=a_report())) as live:
        live.chat(max_tokens=1)
        yield live


def test_graphs_are_told_with_buckets_memory_and_verification(recording):
    told = recording.http.get("/debug/graphs").json()

    assert (told["when"], told["why"], told["backend"]) == ("on-demand", "asked for", "sim")
    assert [graph["name"] for graph in told["graphs"]] == ["decode", "prefill"]
    assert told["graphs"][0]["ladder"] == [1, 2, 4]
    assert told["graphs"][0]["recorded"] == [1, 4]
    assert told["graphs"][1]["state"] == "off: no size is asked for"
    assert (told["pool_bytes"], told["reserve_bytes"], told["cost"]) == (2000, 9000, "saved")
    assert told["verdicts"] == [
        {"graph": "request", "bucket": 4, "size": 3, "worst": 0.0, "ok": True}
    ]
    assert (told["checks"], told["check_failures"]) == (4, 1)


def test_graphs_that_are_off_answer_with_the_reason():
    report = EngineReport(graphs_when="off", graphs_why="their ops are not compiled")
    with serving(core=ScriptedCore(told=report)) as server:
        server.chat(max_tokens=1)

        told = server.http.get("/debug/graphs").json()

    assert (told["when"], told["why"]) == ("off", "their ops are not compiled")
    assert told["graphs"] == []
    assert told["pool_bytes"] == 0


def labelled(server, name: str) -> float:
    """The value of a metric with just these labels."""
    lines = server.http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).rsplit(" ", 1)[1])


def test_steps_are_counted_by_mode_reason_and_padding(recording):
    assert labelled(recording, 'tokamak_steps_by_mode_total{mode="request_graph"}') == 5
    assert labelled(recording, 'tokamak_steps_by_reason_total{why="eager:prefill"}') == 2
    assert labelled(recording, 'tokamak_scheduled_tokens_by_mode_total{mode="request_graph"}') == 15
    assert labelled(recording, 'tokamak_padding_tokens_total{mode="request_graph"}') == 5
    assert labelled(recording, 'tokamak_padding_tokens_total{mode="eager"}') == 0


def test_graphs_are_counted_by_name(recording):
    assert labelled(recording, 'tokamak_graph_recordings_total{graph="decode"}') == 3
    assert labelled(recording, 'tokamak_graph_replays_total{graph="decode"}') == 5
    assert labelled(recording, 'tokamak_graph_pool_bytes{graph="decode"}') == 2000
    assert recording.metric("tokamak_graph_checks_total") == 4
    assert recording.metric("tokamak_graph_check_failures_total") == 1


def test_the_parts_of_a_step_are_a_histogram(recording):
    slow = 'tokamak_step_span_seconds_bucket{le="+Inf",span="launch"}'
    quick = f'tokamak_step_span_seconds_bucket{{le="{BOUNDS_S[-1]}",span="launch"}}'

    assert labelled(recording, slow) == 7
    assert labelled(recording, quick) == 0
    assert labelled(recording, 'tokamak_step_span_seconds_sum{span="launch"}') == 70


def test_every_step_number_is_published(recording):
    published = recording.http.get("/metrics").text

    for row in STEP_METRICS:
        assert f"\n{row.name}{{" in published or f"\n{row.name} " in published


def test_unknown_paths_make_no_new_metrics(server):
    for at in range(5):
        server.http.get(f"/nothing/{at}")

    text = server.http.get("/metrics").text
    assert "/nothing" not in text
    assert 'route="unknown"' in text


def test_the_version_is_the_package_s(server):
    assert server.http.get("/version").json() == {"version": __version__}


def test_models_are_listed_under_all_their_names():
    with serving(served_names=("org/model", "short")) as server:
        listed = server.http.get("/v1/models").json()
        one = server.http.get("/v1/models/org/model").json()
        missing = server.http.get("/v1/models/other")
        answer = server.chat(model="short", max_tokens=1).json()

    assert [card["id"] for card in listed["data"]] == ["org/model", "short"]
    assert one == listed["data"][0]
    assert one["max_model_len"] == 4096
    assert missing.status_code == 404
    assert answer["model"] == "short"


def test_tokenize_and_detokenize_are_inverse(server):
    text = "Grüße, 世界 <|start|>"
    made = server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    back = server.http.post("/detokenize", json={"tokens": made["tokens"]}).json()

    assert back == {"prompt": text}
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 4096
    assert made["token_strs"][0] == "G"


def test_messages_are_tokenized_as_a_chat_would_be(server):
    messages = [{"role": "user", "content": "Hi"}]
    made = server.http.post("/tokenize", json={"messages": messages}).json()
    server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})

    assert made["tokens"] == server.engine.core.added[-1].prompt_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_TOKENS]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_wrong_token_requests_name_the_field(server, path, body, param):
    answer = server.http.post(path, json=body)

    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_the_prefix_cache_is_reset_on_request(server):
    before = server.engine.core.resets

    answer = server.http.post("/reset_prefix_cache")

    assert answer.status_code == 200
    eventually(lambda: server.engine.core.resets == before + 1)


def test_a_slow_step_does_not_block_the_probes():
    with serving(core=ScriptedCore(step_tokens=1), token_s=1.0) as server:
        server.beside(lambda: server.chat(max_tokens=2))
        eventually(lambda: server.engine.core.stats().running_requests == 1)

        assert server.http.get("/health/live", timeout=0.9).status_code == 200


def test_the_server_is_made_without_torch():
    code = "import sys, tokamak.server.app; sys.exit('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=50)

    assert done.returncode == 0
