"""How long until a server answers? Seconds from the command to ready and to the first streamed token.

    python -m benchmarks.serving.start --runs 5

Each run starts `tokamak serve`, asks /health/ready until it says yes, then streams a chat answer. The first run fills
caches and is reported apart. Also: the time to import the front end, which must not import torch.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import time

from benchmarks.record import write_record

FRONT_END = "tokamak.server.app, tokamak.engine.process_client"
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "stream": True,
    "max_tokens": 16,
}


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--record", default="cpu-start")
    given = parser.parse_args()
    first, *warm = [one_start(given.model) for _ in range(given.runs + 1)]
    figures = {
        "first_run": first,
        "warm_runs": warm,
        "median_ready_s": median(warm, "ready_s"),
        "median_first_token_s": median(warm, "first_token_s"),
        "front_end_import_s": import_seconds(FRONT_END),
        "python_start_s": import_seconds("sys"),
    }
    print(json.dumps(figures, indent=2))
    print("wrote", write_record(given.record, figures))


def one_start(model: str) -> dict[str, float]:
    """One server from its start to its first token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = time.perf_counter()
    command = [sys.executable, "-m", "tokamak", "serve", model, "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            wait_ready(port, server)
            ready_s = time.perf_counter() - begun
            first_token(port)
            first_token_s = time.perf_counter() - begun
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
    return {"ready_s": round(ready_s, 3), "first_token_s": round(first_token_s, 3)}


def wait_ready(port: int, server: subprocess.Popen[bytes]) -> None:
    """Ask until the server is ready, at most two minutes and as long as it lives."""
    for _ in range(12_000):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.01)
    raise TimeoutError("the server did not become ready within two minutes")


def first_token(port: int) -> None:
    """Stream an answer up to its first text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps(QUESTION)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    for line in answer:
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get(
            "content"
        ):
            break
    connection.close()


def first_token_of_ids(port: int, prompt: list[int]) -> None:
    """Stream a completion of token ids up to its first event."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "max_tokens": 16,
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert any(line.startswith(b"data: {") for line in answer), "the stream ended without an event"
    connection.close()


def import_seconds(modules: str) -> float:
    """Median wall time of a process that imports modules and ends at once."""
    samples: list[float] = []
    code = f"import os, {modules}; import sys; assert 'torch' not in sys.modules; os._exit(0)"
    for _ in range(7):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        samples.append(time.perf_counter() - begun)
    return round(statistics.median(samples), 3)


def median(runs: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(run[name] for run in runs), 3)


if __name__ == "__main__":
    main()
