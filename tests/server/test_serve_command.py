"""`tokamak serve` from its start to its end, with a scripted engine in place of a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_engine import ScriptedEngine, counts, says
from tokamak.cli import main, serve, serving
from tokamak.config.engine import EngineConfig, ModelFacts
from tokamak.config.options import EngineOptions
from tokamak.config.settle import settle_engine
from tokamak.device.facts import cpu_facts
from tokamak.errors import CheckpointError

FACTS = ModelFacts(
    architecture="LlamaForCausalLM",
    vocab_tokens=260,
    max_position_tokens=4096,
    stored_dtype="float32",
    weight_bytes=1000,
    parameters=1000,
)


def configure(options: EngineOptions, *, progress: bool) -> EngineConfig:
    return settle_engine(options, cpu_facts(), FACTS, Path("/models/scripted"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class NoProcess:
    """Stands where an engine process would be; the scripted engine needs none."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def kill(self) -> None:
        """Nothing runs."""


class Served:
    """A server in this thread, and what happens to it in another."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, engine: Callable[[], ScriptedEngine]
    ) -> None:
        self.port = free_port()
        self.engine: ScriptedEngine | None = None
        self.failures: list[BaseException] = []
        self._make = engine
        monkeypatch.setattr(serve, "configure", configure)
        monkeypatch.setattr(serve, "EngineProcess", NoProcess)
        monkeypatch.setattr(serving, "start_engine", self._start)

    async def _start(self, config: EngineConfig, *, process: NoProcess) -> ScriptedEngine:
        self.engine = self._make()
        self.engine.start()
        return self.engine

    def run(self, act: Callable[[], None], *arguments: str) -> int:
        """Serve while `act` runs; returns the exit status."""

        def acting() -> None:
            try:
                act()
            except BaseException as error:
                self.failures.append(error)
                os.kill(os.getpid(), signal.SIGTERM)

        actor = threading.Thread(target=acting)
        actor.start()
        status = main.run(["serve", "scripted", "--port", str(self.port), *arguments])
        actor.join(10)
        assert not self.failures, self.failures
        return status

    def get(self, path: str) -> tuple[int, Any]:
        return self._answer(urllib.request.Request(self._url(path)))

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        return self._answer(urllib.request.Request(self._url(path), data, headers))

    def until(self, path: str, status: int) -> Any:
        ends_s = time.monotonic() + 10
        while time.monotonic() < ends_s:
            try:
                found, body = self.get(path)
            except urllib.error.URLError:
                found, body = 0, None
            if found == status:
                return body
            time.sleep(0.01)
        raise AssertionError(f"{path} never answered {status}")

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _answer(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_server_answers_and_ends_with_status_0(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, lambda: ScriptedEngine(script=says("Four.")))
    answers: list[tuple[int, Any]] = []

    def act() -> None:
        served.until("/health/ready", 200)
        answers.append(served.post("/v1/completions", {"prompt": "2 + 2 =", "max_tokens": 10}))
        terminate()

    status = served.run(act)

    assert status == 0
    assert answers[0][0] == 200
    assert answers[0][1]["choices"][0]["text"] == "Four."


def test_a_drain_lets_running_requests_end_and_refuses_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(monkeypatch, lambda: ScriptedEngine(script=counts, token_s=0.02))
    answers: dict[str, tuple[int, Any]] = {}

    def long_request() -> None:
        answers["long"] = served.post("/v1/completions", {"prompt": "a", "max_tokens": 60})

    def act() -> None:
        served.until("/health/ready", 200)
        long = threading.Thread(target=long_request)
        long.start()
        while served.get("/health/live")[1]["unfinished_requests"] == 0:
            time.sleep(0.01)
        terminate()
        answers["ready"] = (503, served.until("/health/ready", 503))
        answers["new"] = served.post("/v1/completions", {"prompt": "b", "max_tokens": 1})
        long.join(10)

    status = served.run(act)

    assert status == 0
    assert answers["long"][0] == 200
    assert answers["long"][1]["usage"]["completion_tokens"] == 60
    assert answers["new"][0] == 503
    assert answers["ready"][1]["draining"] is True


def test_what_outlasts_the_drain_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, lambda: ScriptedEngine(script=counts, token_s=0.02))
    statuses: list[int] = []

    def long_request() -> None:
        statuses.append(served.post("/v1/completions", {"prompt": "a", "max_tokens": 3000})[0])

    def act() -> None:
        served.until("/health/ready", 200)
        long = threading.Thread(target=long_request)
        long.start()
        while served.get("/health/live")[1]["unfinished_requests"] == 0:
            time.sleep(0.01)
        terminate()
        long.join(10)

    began_s = time.monotonic()
    status = served.run(act, "--drain-timeout-s", "0.2")

    assert status == 0
    assert statuses == [503]
    assert time.monotonic() - began_s < 8


def test_a_model_that_does_not_load_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> ScriptedEngine:
        raise CheckpointError("weights.safetensors is cut off at byte 17")

    served = Served(monkeypatch, fail)

    status = served.run(lambda: None)

    assert status == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "cut off" in line]
    assert len(lines) == 1


def test_a_dead_engine_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ENGINE_WATCH_S", 0.02)
    served = Served(monkeypatch, lambda: ScriptedEngine(script=counts))

    def act() -> None:
        served.until("/health/ready", 200)
        assert served.engine is not None
        served.engine.die()

    assert served.run(act) == 1


def test_a_unix_socket_is_served_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serve, "configure", configure)
    monkeypatch.setattr(serve, "EngineProcess", NoProcess)

    async def start(config: EngineConfig, *, process: NoProcess) -> ScriptedEngine:
        engine = ScriptedEngine(script=counts)
        engine.start()
        return engine

    monkeypatch.setattr(serving, "start_engine", start)
    path = tmp_path / "tokamak.sock"
    heads: list[bytes] = []

    def act() -> None:
        ends_s = time.monotonic() + 10
        while time.monotonic() < ends_s:
            with socket.socket(socket.AF_UNIX) as client:
                try:
                    client.connect(str(path))
                except OSError:
                    time.sleep(0.01)
                    continue
                client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                heads.append(client.recv(100))
                break
        terminate()

    actor = threading.Thread(target=act)
    actor.start()
    status = main.run(["serve", "scripted", "--uds", str(path)])
    actor.join(10)

    assert status == 0
    assert heads[0].startswith(b"HTTP/1.1 200")
    assert not path.exists()
