"""Do requests and updates find each other, and does the engine hear what it must, and no more?"""

from __future__ import annotations

import asyncio

import pytest

from tests.support.scripted_engine import ScriptedCore, ScriptedEngine, counts, says
from tokamak.core.generation import GenerationEvent, GenerationRequest
from tokamak.core.request import FinishReason, SamplingParams
from tokamak.engine.messages import RequestUpdate, StepUpdates
from tokamak.errors import ContextLengthError, EngineDeadError, RequestError, StepError

GREEDY = SamplingParams(temperature=0, max_tokens=5)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4000)


def a_request(params: SamplingParams = GREEDY, prompt: str | tuple[int, ...] = "Hi"):
    return GenerationRequest(request_id="r", prompt=prompt, params=params)


async def collect(engine: ScriptedEngine, request: GenerationRequest) -> list[GenerationEvent]:
    return [event async for event in engine.generate(request)]


def test_a_request_that_ends_normally_sends_no_abort():
    engine = ScriptedEngine(says("one two"))

    async def scenario():
        async with engine:
            await collect(engine, a_request())
            await collect(engine, a_request(SamplingParams(n=3)))

    asyncio.run(scenario())

    assert len(engine.core.added) == 4
    assert engine.core.aborted == engine.core.unknown_aborts == []


def test_a_stop_string_aborts_the_sibling_that_met_it_and_no_other():
    engine = ScriptedEngine(counts)
    params = SamplingParams(n=3, temperature=1.0, stop=("l",), max_tokens=8)

    async def scenario():
        async with engine:
            return await collect(engine, a_request(params, prompt=(3,)))

    events = asyncio.run(scenario())

    # The siblings say defghijk, efghijkl and fghijkl: the second ends in the engine as well.
    reasons = {e.sibling: e.finish_reason for e in events if e.finish_reason is not None}
    assert reasons == {0: FinishReason.LENGTH, 1: FinishReason.STOP, 2: FinishReason.STOP}
    assert engine.core.aborted == ["r-1:2"]
    assert engine.core.unknown_aborts == []


def test_an_error_of_one_sibling_ends_the_others():
    core = ScriptedCore()
    core.fail_requests[7] = RequestUpdate(request_id="", error="no grammar", error_kind="request")
    engine = ScriptedEngine(core=core)

    async def scenario():
        async with engine:
            with pytest.raises(RequestError, match="no grammar"):
                await collect(engine, a_request(SamplingParams(n=2), prompt=(7,)))
            return engine.health().unfinished_requests

    assert asyncio.run(scenario()) == 0


def test_a_failed_step_ends_its_request_and_the_engine_goes_on():
    core = ScriptedCore()
    core.fail_requests[7] = RequestUpdate(request_id="", error="step 3", error_kind="engine")
    engine = ScriptedEngine(core=core)

    async def scenario():
        async with engine:
            with pytest.raises(StepError, match="step 3"):
                await collect(engine, a_request(prompt=(7,)))
            return await collect(engine, a_request()), engine.health().alive

    events, alive = asyncio.run(scenario())

    assert events[-1].finish_reason is FinishReason.LENGTH
    assert alive


def test_the_same_id_may_be_used_again_while_old_news_is_under_way():
    engine = ScriptedEngine(counts, token_s=0.001)

    async def scenario():
        async with engine:
            first = engine.generate(a_request(ENDLESS))
            await anext(first)
            await first.aclose()
            return await collect(engine, a_request())

    events = asyncio.run(scenario())

    assert len(events[-1].token_ids) + sum(len(e.token_ids) for e in events[:-1]) == 5
    assert len({add.request_id for add in engine.core.added}) == 2


def test_a_long_prompt_does_not_stop_the_event_loop_from_refusing():
    engine = ScriptedEngine(counts)

    async def scenario():
        async with engine:
            with pytest.raises(ContextLengthError, match="5000 tokens"):
                await collect(engine, a_request(prompt="x" * 5000))

    asyncio.run(scenario())

    assert engine.core.added == []


def test_a_task_that_is_cancelled_while_it_waits_aborts_its_request():
    engine = ScriptedEngine(counts, token_s=0.005)

    async def scenario():
        async with engine:
            task = asyncio.create_task(collect(engine, a_request(ENDLESS)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return engine.core.has_work

    assert asyncio.run(scenario()) is False
    assert len(engine.core.aborted) == 1


def test_a_dead_engine_fails_running_and_new_requests():
    engine = ScriptedEngine(counts, token_s=0.005)

    async def scenario():
        async with engine:
            stream = engine.generate(a_request(ENDLESS))
            await anext(stream)
            engine.die("it was killed")
            with pytest.raises(EngineDeadError, match="it was killed"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDeadError, match="it was killed"):
                await collect(engine, a_request())
            return engine.health()

    health = asyncio.run(scenario())

    assert not health.alive
    assert health.failure == "it was killed"
    assert engine.core.aborted == [], "nobody is there to be told"


def test_an_idle_engine_is_drained_at_once():
    engine = ScriptedEngine(counts)

    async def scenario():
        async with engine:
            return await engine.drain(0.0), engine.health().draining

    assert asyncio.run(scenario()) == (True, True)


def test_a_consumer_that_falls_behind_gets_what_waits_in_one_event():
    engine = ScriptedEngine(counts)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=60, logprobs=1)

    async def scenario():
        async with engine:
            quick = await collect(engine, a_request(params, prompt=(3,)))
            stream = engine.generate(a_request(params, prompt=(3,)))
            slow = [await anext(stream)]
            while engine.core.has_work:
                await asyncio.sleep(0)
            slow += [event async for event in stream]
            return quick, slow

    quick, slow = asyncio.run(scenario())

    assert len(slow) == 2 < len(quick)
    for part in (slow, quick):
        assert sum(len(event.token_ids) for event in part) == 60
    assert "".join(e.text for e in slow) == "".join(e.text for e in quick)
    assert [p for e in slow for p in e.logprobs] == [p for e in quick for p in e.logprobs]
    assert slow[-1].finish_reason is quick[-1].finish_reason is FinishReason.LENGTH
    assert slow[-1].usage == quick[-1].usage


def test_an_error_comes_after_the_tokens_before_it_however_late_they_are_taken():
    engine = ScriptedEngine(counts)
    request_id = "r-1:0"
    news = [
        RequestUpdate(request_id=request_id, token_ids=[100], cached_tokens=3),
        RequestUpdate(request_id=request_id, token_ids=[101]),
        RequestUpdate(
            request_id=request_id,
            finish_reason=FinishReason.ERROR,
            error="step 9 failed",
            error_kind="engine",
        ),
    ]

    async def scenario():
        stream = engine.generate(a_request(ENDLESS))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        for update in news:
            engine._receive(StepUpdates(updates=[update], stats=engine.stats()))
        event = await first
        with pytest.raises(StepError, match="step 9 failed"):
            await anext(stream)
        await engine.close()
        return event

    event = asyncio.run(scenario())

    assert event.token_ids == (100, 101)
    assert event.usage.cached_tokens == 3
    assert event.finish_reason is None
