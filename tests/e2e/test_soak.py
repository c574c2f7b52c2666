"""Does the server survive two thousand mixed requests of which a third hang up, with nothing left behind?"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import pytest

from tests.support.live_server import eventually, serving_engine
from tests.support.tiny import VOCAB_TOKENS, write_checkpoint
from tokamak.config.options import EngineOptions
from tokamak.engine.configure import configure
from tokamak.engine.process_client import start_engine

pytestmark = [pytest.mark.slow]

REQUESTS = 2000
CONCURRENCY = 32
HANG_UP_SHARE = 0.3
GAUGES = ("tokamak_running_requests", "tokamak_waiting_requests")
FREE, TOTAL = "tokamak_cache_free_blocks", "tokamak_cache_total_blocks"

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    options = EngineOptions(
        model=str(folder),
        served_model_name="tiny",
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=96,
        max_num_seqs=16,
        num_blocks_override=120,
        max_waiting_requests=256,
    )
    config = configure(options)
    with serving_engine(lambda: start_engine(config)) as live:
        yield live


def a_body(chance: random.Random) -> tuple[str, dict]:
    """A request of a random kind; some are wrong."""
    ids = [chance.randint(10, VOCAB_TOKENS - 5) for _ in range(chance.choice([1, 7, 16, 40, 100]))]
    if chance.random() < 0.3:
        ids = [50] * 32 + ids
    common = {
        "temperature": chance.choice([0, 0.7, 1.5]),
        "max_tokens": chance.choice([1, 4, 16, 60]),
        "stream": chance.random() < 0.5,
        "ignore_eos": chance.random() < 0.5,
    }
    kind = chance.choice(
        ["plain", "n", "stop", "logprobs", "echo", "schema", "penalties", "chat", "wrong", "long"]
    )
    match kind:
        case "n":
            common |= {"n": chance.randint(2, 4), "seed": chance.randint(0, 99)}
        case "stop":
            common |= {"stop": ["e", " the"]}
        case "logprobs":
            common |= {"logprobs": 3}
        case "echo":
            common |= {"echo": True, "logprobs": 1, "max_tokens": chance.choice([0, 3])}
        case "schema":
            common |= {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": SCHEMA},
                }
            }
        case "penalties":
            common |= {"frequency_penalty": 1.0, "repetition_penalty": 1.2, "top_k": 20}
        case "wrong":
            common |= chance.choice(
                [{"top_p": 3}, {"logit_bias": {"999999": 1}}, {"nonsense": 1}, {"max_tokens": 9999}]
            )
        case "long":
            ids = [chance.randint(10, VOCAB_TOKENS - 5) for _ in range(180)]
    if kind == "chat":
        messages = [{"role": "user", "content": "What is the capital " + "of France " * len(ids)}]
        return "/v1/chat/completions", {"messages": messages[:1], **common}
    return "/v1/completions", {"prompt": ids, **common}


async def one(http: httpx.AsyncClient, chance: random.Random, outcomes: Counter) -> None:
    """Send a request; hang up on some of them, before or after the first bytes."""
    path, body = a_body(chance)
    hangs_up = chance.random() < HANG_UP_SHARE
    patience_s = chance.choice([0.0, 0.02, 0.2])
    async with http.stream("POST", path, json=body) as answer:
        if hangs_up and answer.status_code == 200:
            if patience_s:
                await asyncio.sleep(patience_s)
            outcomes["hung up"] += 1
            return
        text = (await answer.aread()).decode()
    if answer.status_code != 200:
        outcomes[str(answer.status_code)] += 1
        assert answer.json()["error"]["message"]
        return
    if body["stream"]:
        assert text.endswith("data: [DONE]\n\n"), text[-300:]
        assert '"error"' not in text
    assert '"finish_reason":null' not in text.rsplit("data: ", 2)[0] or body["stream"]
    outcomes["complete"] += 1


async def hang_up_early(http: httpx.AsyncClient, chance: random.Random, outcomes: Counter) -> None:
    """Leave before an answer has begun."""
    path, body = a_body(chance)
    try:
        await asyncio.wait_for(http.post(path, json=body), timeout=chance.choice([0.005, 0.05]))
        outcomes["answered first"] += 1
    except (TimeoutError, httpx.TimeoutException):
        outcomes["hung up early"] += 1


async def soak(url: str) -> Counter:
    """Everything, at most CONCURRENCY at a time."""
    outcomes: Counter = Counter()
    gate = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=CONCURRENCY * 2)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:

        async def guarded(at: int) -> None:
            chance = random.Random(at)
            async with gate:
                await (hang_up_early if at % 10 == 0 else one)(http, chance, outcomes)

        await asyncio.gather(*(guarded(at) for at in range(REQUESTS)))
    return outcomes


def test_every_accepted_request_ends_and_everything_comes_back(server):
    outcomes = asyncio.run(soak(server.url))

    assert sum(outcomes.values()) == REQUESTS, outcomes
    assert outcomes["complete"] > 800, outcomes
    assert outcomes["hung up"] + outcomes["hung up early"] > 400, outcomes
    assert outcomes["400"] > 50, outcomes
    assert not {status for status in outcomes if status.startswith("5") and status != "503"}
    for gauge in GAUGES:
        eventually(lambda gauge=gauge: server.metric(gauge) == 0, within_s=20)
    eventually(lambda: server.metric(FREE) == server.metric(TOTAL), within_s=20)
    assert server.http.get("/health/progress").status_code == 200
    assert server.complete([20, 21], max_tokens=2, temperature=0).status_code == 200
