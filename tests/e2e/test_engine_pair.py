"""Do a front end and a real engine process, over a tiny model, do together what LLM does alone?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.support.tiny import write_checkpoint
from tokamak.config.options import EngineOptions
from tokamak.core.generation import GenerationRequest
from tokamak.core.request import SamplingParams
from tokamak.engine.configure import configure
from tokamak.engine.process_client import ProcessClient, start_engine
from tokamak.errors import CheckpointError, OptionError
from tokamak.llm import LLM

OPTIONS = {"dtype": "fp32", "threads": 1, "max_num_seqs": 8, "kv_cache_memory_bytes": "8MiB"}
PROMPTS = ["Hello world", "What is the capital of", "The", "you and the user", "a" * 40]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=24, n=3, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=60, stop=("e", "th"), ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, min_tokens=3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def a_running_engine(folder) -> AsyncIterator[ProcessClient]:
    client = await start_engine(configure(EngineOptions(model=str(folder), **OPTIONS)))
    try:
        yield client
    finally:
        await client.close()


async def answer(client: ProcessClient, name: str, prompt: str, params: SamplingParams):
    """Joined text, ids and usage of each sibling."""
    request = GenerationRequest(request_id=name, prompt=prompt, params=params)
    events = [event async for event in client.generate(request)]
    siblings = []
    for sibling in range(params.n):
        own = [event for event in events if event.sibling == sibling]
        siblings.append(
            (
                "".join(event.text for event in own),
                tuple(i for event in own for i in event.token_ids),
                own[-1].finish_reason,
                own[-1].stop_reason,
            )
        )
    return siblings


def test_a_process_gives_what_llm_gives_alone_at_once_and_after_hang_ups(folder):
    async def scenario():
        async with a_running_engine(folder) as client:
            alone = [
                await answer(client, f"a{at}", prompt, params)
                for at, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
            ]
            leaving = [
                client.generate(
                    GenerationRequest(
                        request_id="gone",
                        prompt=prompt,
                        params=SamplingParams(n=2, ignore_eos=True),
                    )
                )
                for prompt in PROMPTS
            ]
            for stream in leaving:
                await anext(stream)
            together = asyncio.gather(
                *(
                    answer(client, f"t{at}", prompt, params)
                    for at, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
                )
            )
            for stream in leaving:
                await stream.aclose()
            return alone, await together, await settled_stats(client)

    alone, together, stats = asyncio.run(scenario())

    with LLM(str(folder), **OPTIONS) as llm:
        offline = [
            [(o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs]
            for output in llm.generate(PROMPTS, PARAMS)
        ]
    assert alone == offline
    assert together == offline
    assert (stats.running_requests, stats.waiting_requests) == (0, 0)
    assert stats.free_blocks == stats.total_blocks


async def settled_stats(client: ProcessClient):
    """The engine's numbers once it has no work."""
    async with asyncio.timeout(10):
        while client.stats().running_requests or client.stats().waiting_requests:
            await asyncio.sleep(0.05)
    return client.stats()


async def start_and_close(config) -> None:
    await (await start_engine(config)).close()


def test_an_engine_process_that_finds_a_truncated_file_says_which(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    config = configure(EngineOptions(model=str(folder), **OPTIONS))
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(CheckpointError, match=file.name):
        asyncio.run(start_and_close(config))


def test_a_cache_too_small_for_one_request_is_refused_by_the_engine_process(folder):
    config = configure(EngineOptions(model=str(folder), max_model_len=512, **OPTIONS))
    config = replace(config, cache=replace(config.cache, blocks=4))

    with pytest.raises(OptionError, match=r"max_model_len.*num_blocks_override"):
        asyncio.run(start_and_close(config))
