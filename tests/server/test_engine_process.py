"""Does an engine process start, serve, fail and end as its client may expect?"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.scripted_engine import VOCAB_TOKENS, byte_tokenizer, chat_template
from tokamak.config.engine import EngineConfig, ModelFacts
from tokamak.config.options import EngineOptions
from tokamak.config.settle import settle_engine
from tokamak.core.generation import GenerationEvent, GenerationRequest
from tokamak.core.request import FinishReason, SamplingParams
from tokamak.device.facts import cpu_facts
from tokamak.engine.process_client import ProcessClient, start_engine
from tokamak.errors import (
    CheckpointError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    RequestError,
)

ENDLESS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4000)


def a_scripted_config(behaviour: str) -> EngineConfig:
    """A config whose model path names a behaviour; nothing else of it is read."""
    facts = ModelFacts(
        architecture="Scripted",
        vocab_tokens=VOCAB_TOKENS,
        max_position_tokens=4096,
        stored_dtype="none",
        weight_bytes=0,
        parameters=0,
    )
    options = EngineOptions(model="scripted")
    return settle_engine(options, cpu_facts(), facts, Path(f"scripted:{behaviour}"))


@asynccontextmanager
async def a_running_engine(behaviour: str = "counts") -> AsyncIterator[ProcessClient]:
    client = await start_engine(
        a_scripted_config(behaviour),
        module="tests.support.scripted_process",
        load=lambda config: (byte_tokenizer(), chat_template()),
    )
    try:
        yield client
    finally:
        await client.close()


def a_request(
    name: str = "r", params: SamplingParams | None = None, prompt: str = "Hi"
) -> GenerationRequest:
    params = params or SamplingParams(temperature=0, max_tokens=5)
    return GenerationRequest(request_id=name, prompt=prompt, params=params)


async def collect(client: ProcessClient, request: GenerationRequest) -> list[GenerationEvent]:
    return [event async for event in client.generate(request)]


async def until(condition, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def text_of(events: list[GenerationEvent], sibling: int = 0) -> str:
    return "".join(event.text for event in events if event.sibling == sibling)


def test_a_request_comes_back_as_text_with_its_numbers():
    async def scenario():
        async with a_running_engine("says-hello") as client:
            return await collect(client, a_request(params=SamplingParams(n=2, temperature=0)))

    events = asyncio.run(scenario())

    assert text_of(events, 0) == text_of(events, 1) == "Hello, wörld."
    last = [event for event in events if event.sibling == 1][-1]
    assert last.finish_reason is FinishReason.STOP
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 15)
    assert last.timings.arrived_s <= last.timings.first_token_s <= last.timings.last_token_s


def test_where_steps_went_comes_with_the_first_news():
    async def scenario():
        async with a_running_engine("reports") as client:
            await until(lambda: client.report().graphs_when == "startup")
            await collect(client, a_request())
            return client.report()

    report = asyncio.run(scenario())

    assert report.reasons == {"bucket": 3}


def test_a_fatal_error_is_one_line_with_its_name_and_ends_the_engine(capfd):
    async def scenario():
        async with a_running_engine("differs") as client:
            with pytest.raises(EngineDeadError) as caught:
                await collect(client, a_request(params=ENDLESS))
            return str(caught.value)

    told = asyncio.run(scenario())

    printed = [line for line in capfd.readouterr().err.splitlines() if "bucket 4" in line]
    assert printed == [
        "engine: the engine ends: GraphMismatch: bucket 4 of decode gave other numbers "
        "(hint: use graphs=off)"
    ]
    assert "bucket 4 of decode" in told


def test_many_requests_at_once_keep_their_own_answers():
    async def scenario():
        async with a_running_engine() as client:
            requests = [a_request(f"r{at}", prompt=f"prompt {at}") for at in range(32)]
            alone = [text_of(await collect(client, request)) for request in requests]
            together = await asyncio.gather(*(collect(client, request) for request in requests))
            return alone, [text_of(events) for events in together]

    alone, together = asyncio.run(scenario())

    assert together == alone
    assert len(set(alone)) > 5


def test_leaving_a_stream_aborts_every_sibling_at_once():
    async def scenario():
        async with a_running_engine("slow") as client:
            params = SamplingParams(n=3, temperature=0, ignore_eos=True, max_tokens=4000)
            stream = client.generate(a_request(params=params))
            await anext(stream)
            running = client.health().unfinished_requests
            await stream.aclose()
            left = client.health().unfinished_requests
            await until(lambda: client.stats().running_requests == 0, timeout_s=1.0)
            return running, left, client.stats()

    running, left, stats = asyncio.run(scenario())

    assert (running, left) == (3, 0)
    assert stats.free_blocks == stats.total_blocks
    assert stats.finished_requests == 0


def test_a_queued_request_that_is_refused_raises_overloaded_and_the_engine_goes_on():
    async def scenario():
        async with a_running_engine("full") as client:
            with pytest.raises(OverloadedError, match="full") as refused:
                await collect(client, a_request())
            return refused.value.retry_after_s, client.health()

    retry_after_s, health = asyncio.run(scenario())

    assert retry_after_s == 1.0
    assert health.alive
    assert health.unfinished_requests == 0


def test_a_wrong_request_is_refused_before_the_engine_hears_of_it():
    async def scenario():
        async with a_running_engine() as client:
            with pytest.raises(RequestError) as refused:
                await collect(client, a_request(params=SamplingParams(logit_bias={5000: 1.0})))
            return refused.value.field, text_of(await collect(client, a_request()))

    field, text = asyncio.run(scenario())

    assert field == "logit_bias"
    assert len(text) == 5


def test_a_killed_engine_fails_its_requests_and_health_says_so():
    async def scenario():
        async with a_running_engine("slow") as client:
            streams = [client.generate(a_request(f"r{at}", ENDLESS)) for at in range(3)]
            for stream in streams:
                await anext(stream)
            os.kill(client.process_id, signal.SIGKILL)
            failures = await asyncio.gather(*map(drained, streams), return_exceptions=True)
            with pytest.raises(EngineDeadError):
                await collect(client, a_request())
            return failures, client.health()

    async def drained(stream):
        async with asyncio.timeout(10):
            return [event async for event in stream]

    failures, health = asyncio.run(scenario())

    assert [type(failure) for failure in failures] == [EngineDeadError] * 3
    assert "SIGKILL" in str(failures[0])
    assert not health.alive
    assert "SIGKILL" in str(health.failure)
    assert health.unfinished_requests == 0


def test_an_engine_that_fails_tells_why():
    async def scenario():
        async with a_running_engine("fails-at-step") as client:
            with pytest.raises(EngineDeadError) as failure:
                await collect(client, a_request(params=ENDLESS))
            return str(failure.value), client.health()

    message, health = asyncio.run(scenario())

    assert "RuntimeError: the script failed" in message
    assert not health.alive


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [
        ("refuses", CheckpointError, "ends at byte 7 of 100 (hint: fetch it again)"),
        ("breaks", EngineError, "ZeroDivisionError: a bug of two lines"),
        ("leaves", EngineError, "exit code 9 while it started"),
    ],
)
def test_a_start_that_fails_raises_what_the_engine_found(behaviour, kind, words):
    async def scenario():
        async with a_running_engine(behaviour):
            pass

    with pytest.raises(kind) as failure:
        asyncio.run(scenario())

    assert words in str(failure.value)
    assert "\n" not in str(failure.value)


def test_an_idle_engine_speaks_every_half_second_and_tokens_age_only_while_there_is_work():
    async def scenario():
        async with a_running_engine("slow") as client:
            idle = client.health()
            await asyncio.sleep(0.7)
            await until(lambda: client.health().loop_age_s < 0.3)
            stream = client.generate(a_request(params=ENDLESS))
            await anext(stream)
            busy = client.health()
            await stream.aclose()
            return idle, busy

    idle, busy = asyncio.run(scenario())

    assert idle.token_age_s is None
    assert busy.token_age_s is not None
    assert busy.token_age_s < 5.0
    assert busy.unfinished_requests == 1


def test_draining_refuses_new_requests_and_waits_for_the_running_ones():
    async def scenario():
        async with a_running_engine("slow") as client:
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=10)
            running = asyncio.create_task(collect(client, a_request("first", params)))
            await until(lambda: client.health().unfinished_requests == 1)
            in_time = await client.drain(0.01)
            with pytest.raises(OverloadedError):
                await collect(client, a_request("second"))
            drained = await client.drain(5.0)
            return in_time, drained, client.health().draining, await running

    in_time, drained, draining, events = asyncio.run(scenario())

    assert (in_time, drained, draining) == (False, True, True)
    assert len(text_of(events)) == 10


def test_closing_ends_unfinished_requests_with_abort_and_the_process():
    async def scenario():
        async with a_running_engine("slow") as client:
            task = asyncio.create_task(collect(client, a_request(params=ENDLESS)))
            await until(lambda: client.health().unfinished_requests == 1)
            await client.close()
            return await task, client.process_id

    events, process_id = asyncio.run(scenario())

    assert events[-1].finish_reason is FinishReason.ABORT
    assert not psutil.pid_exists(process_id)


def test_sigterm_ends_an_engine_in_order():
    async def scenario():
        async with a_running_engine("slow") as client:
            task = asyncio.create_task(collect(client, a_request(params=ENDLESS)))
            await until(lambda: client.health().unfinished_requests == 1)
            os.kill(client.process_id, signal.SIGTERM)
            events = await task
            await until(lambda: not client.health().alive)
            return events, client.health().failure

    events, failure = asyncio.run(scenario())

    assert events[-1].finish_reason is FinishReason.ABORT
    assert failure == "the engine process ended with exit code 0"


PARENT = """
import asyncio, sys
from tests.server.test_engine_process import ENDLESS, a_request, a_running_engine

async def main():
    async with a_running_engine("slow") as client:
        print(client.process_id, flush=True)
        async for event in client.generate(a_request(params=ENDLESS)):
            pass

asyncio.run(main())
"""


def test_an_engine_ends_with_its_front_end_however_that_ends():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    with parent:
        child = psutil.Process(int(parent.stdout.readline()))

        parent.kill()

    child.wait(timeout=10)


def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def scenario():
        async with a_running_engine() as client:
            while_running = list(tmp_path.iterdir())
            await collect(client, a_request())
            return while_running

    while_running = asyncio.run(scenario())

    assert while_running == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_name_too_long_for_a_socket_is_no_obstacle(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))

    async def scenario():
        async with a_running_engine() as client:
            return text_of(await collect(client, a_request()))

    text = asyncio.run(scenario())

    assert len(text) == 5


def test_the_front_end_of_an_engine_process_loads_no_torch():
    code = "import sys, tokamak.engine.process_client; sys.exit('torch' in sys.modules)"

    started_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=30)

    assert done.returncode == 0, f"torch was imported ({time.monotonic() - started_s:.1f} s)"
