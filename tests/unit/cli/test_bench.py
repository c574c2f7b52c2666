"""Measured times become the right figures, and the load client reads what servers send."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokamak
from tests.support.scripted_engine import (
    ScriptedCore,
    ScriptedEngine,
    byte_tokenizer,
    chat_template,
    counts,
)
from tokamak.cli import bench, main
from tokamak.cli.bench_report import latency_report, percentile, serve_report
from tokamak.cli.bench_serve import Reply, Server, Work, random_ids, run_open_loop, text_prompts
from tokamak.errors import EngineError, OptionError
from tokamak.llm import LLM

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_within_the_values(values: list[float], share: float) -> None:
    found = percentile(values, share)

    assert min(values) <= found <= max(values)
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


def test_figures_follow_from_times() -> None:
    good = Reply(
        sent_s=1.0, text_at_s=[1.5, 1.7, 2.5], ended_s=2.5, prompt_tokens=10, output_tokens=5
    )
    bad = Reply(sent_s=1.0, ended_s=9.0, error="HTTP 503: later")

    report = serve_report([good, bad], 2.0, detailed=True)

    assert (report["completed"], report["failed"]) == (1, 1)
    assert report["mean_ttft_ms"] == pytest.approx(500)
    assert report["mean_tpot_ms"] == pytest.approx(1000 / 4)
    assert report["mean_itl_ms"] == pytest.approx(500)
    assert report["p99_e2el_ms"] == pytest.approx(1500)
    assert report["output_throughput"] == pytest.approx(2.5)
    assert report["total_token_throughput"] == pytest.approx(7.5)
    assert report["request_throughput"] == pytest.approx(0.5)
    assert report["errors"] == ["", "HTTP 503: later"]


def test_latency_has_percentiles_by_name() -> None:
    report = latency_report([1.0, 2.0, 3.0])

    assert report["avg_latency"] == 2.0
    assert report["percentiles"]["50"] == 2.0


def test_random_ids_leave_out_the_first_ones() -> None:
    ids = random_ids(random.Random(1), 1000, 500)

    assert len(ids) == 1000
    assert min(ids) >= 100
    assert max(ids) < 500
    assert ids == random_ids(random.Random(1), 1000, 500)


def test_prompts_come_from_lines_or_json(tmp_path: Path) -> None:
    lines, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    lines.write_text("one\n\ntwo\n")
    rows.write_text('{"prompt": "three"}\n')

    assert set(text_prompts(lines, 50, random.Random(0))) == {"one", "two"}
    assert text_prompts(rows, 2, random.Random(0)) == ["three", "three"]
    with pytest.raises(OptionError, match="cannot be read"):
        text_prompts(tmp_path / "none", 1, random.Random(0))


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunked(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


async def load(handle: Handler, works: list[Work], **settings: object) -> list[Reply]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    options: dict[str, object] = {
        "model": "m",
        "request_rate": float("inf"),
        "burstiness": 1.0,
        "max_concurrency": None,
        "generator": random.Random(0),
    }
    async with server:
        _, replies, _ = await run_open_loop(
            Server(host="127.0.0.1", port=port),
            "/v1/completions",
            works,
            **(options | settings),  # pyright: ignore[reportArgumentType]
        )
    return replies


async def read_request(reader: asyncio.StreamReader) -> dict[str, object]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return json.loads(await reader.readexactly(length))


WORK = Work(prompt=[200, 201], output_tokens=3)


def test_a_stream_is_read_across_any_chunk_borders() -> None:
    asked: list[dict[str, object]] = []
    body = (
        event(choices=[{"text": "a"}])
        + event(choices=[{"text": "b"}])
        + event(choices=[], usage={"prompt_tokens": 2, "completion_tokens": 3})
        + b"data: [DONE]\n\n"
    )

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await read_request(reader))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at in range(0, len(body), 7):
            writer.write(chunked(body[at : at + 7]))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    (reply,) = asyncio.run(load(handle, [WORK]))

    assert reply.error is None
    assert (reply.prompt_tokens, reply.output_tokens, len(reply.text_at_s)) == (2, 3, 2)
    assert asked[0]["prompt"] == [200, 201]
    assert asked[0]["max_tokens"] == 3
    assert asked[0]["stream_options"] == {"include_usage": True}


def test_refusals_and_broken_streams_are_errors_of_their_request() -> None:
    calls = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        await read_request(reader)
        if calls == 1:
            writer.write(b'HTTP/1.1 503 No\r\nContent-Length: 6\r\n\r\n"full"')
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nda")
        await writer.drain()
        writer.close()

    replies = asyncio.run(load(handle, [WORK, WORK], max_concurrency=1))

    assert replies[0].error == 'HTTP 503: "full"'
    assert replies[1].error is not None


def test_no_more_than_the_allowed_requests_are_in_flight() -> None:
    flying, most = 0, 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await read_request(reader)
        await asyncio.sleep(0.01)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + event(choices=[{"text": "a"}]))
        flying -= 1
        writer.close()

    replies = asyncio.run(load(handle, [WORK] * 12, max_concurrency=3))

    assert most == 3
    assert all(reply.error is None for reply in replies)


def test_arrivals_do_not_wait_for_answers() -> None:
    seen: list[float] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        seen.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.3)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + event(choices=[{"text": "a"}]))
        writer.close()

    asyncio.run(load(handle, [WORK] * 10, request_rate=200.0))

    assert len(seen) == 10
    assert 0 < seen[-1] - seen[0] < 0.3


def test_no_server_is_one_line_with_what_to_do() -> None:
    with pytest.raises(EngineError, match=r"no server answers at 127\.0\.0\.1:1: .*tokamak serve"):
        asyncio.run(
            run_open_loop(
                Server(host="127.0.0.1", port=1),
                "/v1/completions",
                [WORK],
                model=None,
                request_rate=1.0,
                burstiness=1.0,
                max_concurrency=None,
                generator=random.Random(0),
            )
        )


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> ScriptedCore:
    made = ScriptedCore(script=counts)
    llm = LLM.over(made, byte_tokenizer(), chat_template(), ScriptedEngine(core=made).info)
    monkeypatch.setattr(tokamak, "LLM", lambda model, **options: llm, raising=False)
    return made


def test_throughput_counts_every_token(core: ScriptedCore, tmp_path: Path) -> None:
    path = tmp_path / "out.json"

    status = main.run(
        [
            *("bench", "throughput", "--num-prompts", "5", "--input-len", "10"),
            *("--output-len", "4", "--output-json", str(path)),
        ]
    )

    report = json.loads(path.read_text())
    assert status == 0
    assert (report["num_requests"], report["total_num_tokens"]) == (5, 5 * 14)
    assert {len(add.prompt_ids) for add in core.added} == {10}
    assert all(add.params.ignore_eos for add in core.added)


def test_latency_leaves_the_warm_up_out(core: ScriptedCore, tmp_path: Path) -> None:
    path = tmp_path / "out.json"

    main.run(
        [
            *("bench", "latency", "--num-iters", "3", "--num-iters-warmup", "2"),
            *("--batch-size", "2", "--input-len", "8", "--output-len", "2"),
            *("--output-json", str(path)),
        ]
    )

    assert len(json.loads(path.read_text())["latencies"]) == 3
    assert len(core.added) == 2 * (3 + 2)


def test_chat_needs_text(capsys: pytest.CaptureFixture[str]) -> None:
    status = main.run(["bench", "serve", "--endpoint", bench.CHAT])

    assert status == 2
    assert "takes text" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--request-rate", "--num-prompts"])
def test_zero_rates_and_counts_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main.run(["bench", "serve", flag, "0"])

    assert status == 2
    assert flag in capsys.readouterr().err
