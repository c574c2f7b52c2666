"""What does HTTP cost beside the engine alone, and how long until a first token? On random weights of published models.

    python -m benchmarks.serving.gpu_serve [--models qwen3-0.6b] [--concurrency 1 32 128] [--record h200-serve]

Per model: the engine's loop in a process of its own, fed so that always so many requests run, gives the throughput to
compare with. Then `tokamak serve` starts twice with empty caches of its own (the first start compiles), and `tokamak
bench serve` keeps as many requests under way. The figure is the median of several rounds on both sides; prompts of
1024 random ids, 128 new tokens, greedy, no prefix cache.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.published import MODELS
from benchmarks.record import write_record
from benchmarks.serving.start import first_token_of_ids, wait_ready
from tokamak.config.options import EngineOptions
from tokamak.core.request import SamplingParams
from tokamak.device.facts import device_facts
from tokamak.engine.configure import configure
from tokamak.engine.core import EngineCore
from tokamak.engine.messages import AddRequest

REQUESTS = {1: 8, 32: 128, 128: 384}
"""Requests of a round by concurrency; four times the concurrency for others."""

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def arguments() -> argparse.Namespace:
    """What was asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=["qwen3-0.6b"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="new tokens of a request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--record", help="write benchmarks/records/NAME.json")
    parser.add_argument("--engine", help="measure the engine alone on this folder, in this process")
    return parser.parse_args()


def main() -> None:
    """Measure, show a table, and write a record if one is named."""
    asked = arguments()
    if asked.engine:
        print(json.dumps(engine_alone(asked.engine, asked)))
        return
    missing = [name for name in ("httptools", "uvloop") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{' and '.join(missing)} not installed: uvicorn's slower parts are measured")
    rows: list[dict[str, Any]] = []
    starts: dict[str, Any] = {}
    device = ""
    for name in asked.models:
        found, starts[name], device = measure(name, asked)
        rows += found
    print(table(rows, starts))
    if asked.record:
        figures = {
            "prompt_tokens": asked.prompt,
            "new_tokens": asked.new,
            "rounds": asked.rounds,
            "not_installed": missing,
            "rows": rows,
            "starts": starts,
        }
        print(write_record(asked.record, figures, device_facts(device)))


def measure(name: str, asked: argparse.Namespace) -> tuple[list[dict[str, Any]], Any, str]:
    """Rows of a model, what its starts took, and the device."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MODELS[name].config), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.serving.gpu_serve", *sys.argv[1:]]
        done = subprocess.run(
            [*command, "--engine", str(folder)], stdout=subprocess.PIPE, check=True
        )
        alone = json.loads(done.stdout.decode().splitlines()[-1])
        print(f"{name}, the engine alone: {alone}", flush=True)
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": f"{scratch}/triton",
            "XDG_CACHE_HOME": f"{scratch}/cache",
            "TOKAMAK_CACHE": f"{scratch}/tokamak",
        }
        cold = Server(folder, asked, environment)
        cold.stop()
        warm = Server(folder, asked, environment)
        try:
            rows = [
                _row(name, concurrency, warm, alone["tokens_per_s"][str(concurrency)], asked)
                for concurrency in asked.concurrency
            ]
        finally:
            warm.stop()
        return rows, {"cold": cold.start, "warm": warm.start}, alone["device"]


def _options(folder: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Alike for the engine alone and the server."""
    return {
        "model": folder,
        "load_format": "random",
        "device": asked.device,
        "max_model_len": 2 * (asked.prompt + asked.new),
        "enable_prefix_caching": False,
    }


def engine_alone(folder: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Output tokens a second by concurrency of the engine's loop in this process."""
    config = configure(EngineOptions(**_options(folder, asked)), progress=False)
    core = EngineCore(config)
    gc.collect()
    gc.freeze()  # As an engine process does.
    chance = random.Random(0)
    found: dict[str, float] = {}
    for concurrency in asked.concurrency:
        rates: list[float] = []
        for turn in range(asked.rounds + 1):
            count = REQUESTS.get(concurrency, 4 * concurrency)
            requests = [_request(f"{concurrency}-{turn}-{at}", chance, config.model.facts.vocab_tokens, asked) for at in range(count)]  # fmt: skip
            seconds = _closed_loop(core, requests, concurrency)
            if turn:
                rates.append(count * asked.new / seconds)
        found[str(concurrency)] = round(statistics.median(rates), 1)
    core.close()
    return {"device": config.model.device, "tokens_per_s": found}


def _request(
    name: str, chance: random.Random, vocab_tokens: int, asked: argparse.Namespace
) -> AddRequest:
    return AddRequest(
        request_id=name,
        prompt_ids=[chance.randrange(100, min(vocab_tokens, 30000)) for _ in range(asked.prompt)],
        params=SamplingParams(temperature=0.0, ignore_eos=True),
        max_tokens=asked.new,
        stop_ids=[],
        sibling=0,
        priority=0,
        cache_salt="",
    )


def _closed_loop(core: EngineCore, requests: list[AddRequest], concurrency: int) -> float:
    """Seconds until all have ended; a new one comes as one ends."""
    began, left = time.perf_counter(), requests[::-1]
    for _ in range(min(concurrency, len(left))):
        core.add(left.pop())
    while core.has_work:
        for update in core.step():
            if update.error:
                raise RuntimeError(update.error)
            if update.finish_reason is not None and left:
                core.add(left.pop())
    return time.perf_counter() - began


class Server:
    """`tokamak serve` over a folder; `start` says when it was ready and when the first token came."""

    def __init__(
        self, folder: Path, asked: argparse.Namespace, environment: dict[str, str]
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        flags = _options(str(folder), asked)
        words = [sys.executable, "-m", "tokamak", "serve", flags.pop("model")]
        for name, value in flags.items():
            flag = name.replace("_", "-")
            words += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
        self._log = folder.parent / "server.log"
        began = time.perf_counter()
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*words, "--port", str(self.port)], env=environment, stderr=log
            )
        try:
            wait_ready(self.port, self.process)
            ready_s = time.perf_counter() - began
            first_token_of_ids(self.port, [100, 101, 102])
            first_token_s = time.perf_counter() - began
        except BaseException:
            self.stop()
            print(self._said(), flush=True)
            raise
        loaded = re.search(r"seconds: (.*)", self._said())
        self.start = {
            "ready_s": round(ready_s, 2),
            "first_token_s": round(first_token_s, 2),
            "load_s": loaded[1] if loaded else "",
        }
        print(f"start: {self.start}", flush=True)
        for line in self._said().splitlines():
            if "WARN" in line or "warn" in line:
                print(f"  {line}", flush=True)

    def busy_s(self) -> float:
        """Processor time of the front end so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def stop(self) -> None:
        """End it in order."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)

    def _said(self) -> str:
        return self._log.read_text(encoding="utf-8")


def _row(
    name: str, concurrency: int, server: Server, alone: float, asked: argparse.Namespace
) -> dict[str, Any]:
    """One concurrency: the medians of several rounds."""
    count = REQUESTS.get(concurrency, 4 * concurrency)
    reports: list[dict[str, Any]] = []
    busy: list[float] = []
    for turn in range(asked.rounds + 1):
        before = server.busy_s()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            words = [
                "--base-url", f"http://127.0.0.1:{server.port}", "--max-concurrency", str(concurrency),
                "--num-prompts", str(count), "--input-len", str(asked.prompt), "--output-len", str(asked.new),
                "--vocab-tokens", str(min(30000, int(str(MODELS[name].config["vocab_size"])))),
                "--seed", str(100 * concurrency + turn), "--output-json", file.name,
            ]  # fmt: skip
            subprocess.run(
                [sys.executable, "-m", "tokamak", "bench", "serve", *words],
                stdout=subprocess.DEVNULL,
                check=True,
            )
            if turn:
                reports.append(json.loads(Path(file.name).read_text()))
                busy.append(server.busy_s() - before)
    failed = sum(report["failed"] for report in reports)
    if failed:
        raise RuntimeError(f"{failed} requests failed at concurrency {concurrency}")

    def median(key: str) -> float:
        return round(statistics.median(report[key] for report in reports), 3)

    served = median("output_throughput")
    row = {
        "model": name,
        "concurrency": concurrency,
        "requests": count,
        "engine_tokens_per_s": alone,
        "served_tokens_per_s": served,
        "http_cost_percent": round(100 * (1 - served / alone), 2),
        "ttft_ms": median("median_ttft_ms"),
        "tpot_ms": median("median_tpot_ms"),
        "p99_itl_ms": median("p99_itl_ms"),
        "front_end_us_per_token": round(1e6 * statistics.median(busy) / (count * asked.new), 1),
    }
    print(json.dumps(row), flush=True)
    return row


def table(rows: list[dict[str, Any]], starts: dict[str, Any]) -> str:
    """What was found."""
    lines = [
        f"{model:14} {kind:4} start: ready {start['ready_s']:6.2f} s, first token {start['first_token_s']:6.2f} s ({start['load_s']})"
        for model, both in starts.items()
        for kind, start in both.items()
    ]
    lines.append(
        f"{'model':14} {'streams':>7} {'engine/s':>9} {'served/s':>9} {'cost':>7} {'ttft':>8} {'tpot':>7} {'p99 itl':>8} {'us/token':>8}"
    )
    lines += [
        f"{row['model']:14} {row['concurrency']:7} {row['engine_tokens_per_s']:9.0f} {row['served_tokens_per_s']:9.0f} "
        f"{row['http_cost_percent']:6.1f}% {row['ttft_ms']:8.1f} {row['tpot_ms']:7.3f} {row['p99_itl_ms']:8.2f} "
        f"{row['front_end_us_per_token']:8.1f}"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
