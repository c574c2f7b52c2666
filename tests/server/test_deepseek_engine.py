"""Does a DeepSeek V4.1 engine behind HTTP give the tokens of its model alone, cut, cached and preempted?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.live_server import eventually, serving_engine
from tests.support.numbered import served_v4_1
from tests.support.steps import ModelDriver, a_build, a_model
from tests.support.tiny import VOCAB_TOKENS, tiny_tokenizer, write_checkpoint
from tests.support.tiny_v4 import weights_of
from tokamak.config.options import EngineOptions
from tokamak.engine.configure import configure
from tokamak.engine.process_client import start_engine
from tokamak.text.deepseek_chat import DeepseekChat
from tokamak.text.tokenizer import Tokenizer

BLOCK_TOKENS = 8
CHUNK_TOKENS = 16
BLOCKS = 24
"""Too few for all that is asked for at once below."""


@pytest.fixture(scope="module")
def config():
    return served_v4_1()


@pytest.fixture(scope="module")
def served(config, tmp_path_factory):
    folder = write_checkpoint(
        tmp_path_factory.mktemp("tiny-v41"), config, weights=weights_of(config), chat_template=None
    )
    options = EngineOptions(
        model=str(folder),
        served_model_name="tiny-v41",
        dtype="float32",
        max_model_len=160,
        max_num_batched_tokens=CHUNK_TOKENS,
        block_size=BLOCK_TOKENS,
        max_num_seqs=4,
        num_blocks_override=BLOCKS,
        threads=1,
    )
    settled = configure(options)
    with serving_engine(lambda: start_engine(settled)) as live:
        yield live


@pytest.fixture(scope="module")
def alone(config):
    """The greedy tokens of a prompt in a model that nothing else runs on."""
    weights = weights_of(config)

    def tokens(prompt, count):
        model = a_model(config, weights, a_build())
        model.take_tokenizer(Tokenizer(tiny_tokenizer(), bos_id=None, eos_ids=()))
        return ModelDriver(model, block_tokens=BLOCK_TOKENS).greedy("alone", prompt, count)

    return tokens


@pytest.fixture(autouse=True)
def _everything_comes_back(served):
    """After every test: nothing runs, and every block is free."""
    yield
    eventually(lambda: served.metric("tokamak_running_requests") == 0)
    eventually(
        lambda: (
            served.metric("tokamak_cache_free_blocks")
            == served.metric("tokamak_cache_total_blocks")
        )
    )


def ids(count, seed):
    """Pseudo-random ids of ordinary tokens."""
    return [
        20 + (seed * 7919 + at * at * 31 + at * 17) % (VOCAB_TOKENS - 30) for at in range(count)
    ]


def ask(server, prompt, max_tokens=8):
    answer = server.complete(
        prompt, temperature=0, ignore_eos=True, return_token_ids=True, max_tokens=max_tokens
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prompts_in_chunks_with_a_prefix_in_the_cache_give_their_tokens(served, alone):
    # Five steps of prefill each; the second prompt leaves the first one's text inside a chunk and an open group.
    first = ids(77, 1)
    second = first[:51] + ids(20, 2)

    cold, warm, again = ask(served, first), ask(served, second), ask(served, first)

    # Late layers of the first prompt run from its 56th token on, and need no row before it: 48 tokens of it are reused.
    assert [cached(answer) for answer in (cold, warm, again)] == [0, 48, 48]
    assert tokens(cold) == tokens(again) == alone(first, 8)
    assert tokens(warm) == alone(second, 8)


def test_requests_that_push_each_other_out_give_their_tokens(served, alone):
    assert served.http.post("/reset_prefix_cache").status_code == 200
    prompts = [ids(30 + at, 10 + at) for at in range(4)]
    before = served.metric("tokamak_preemptions_total")

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(served, prompt, 40), prompts))

    assert served.metric("tokamak_preemptions_total") > before
    assert [tokens(answer) for answer in answers] == [alone(prompt, 40) for prompt in prompts]


def test_a_chat_is_written_in_the_built_in_format_and_answered(served, alone):
    messages = [
        {"role": "system", "content": "The"},
        {"role": "user", "content": "What"},
    ]
    prompt = DeepseekChat("deepseek_v41").render(messages)

    listed = served.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    answer = served.http.post(
        "/v1/chat/completions",
        json={
            "messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": 8, "return_token_ids": True,
        },
    ).json()  # fmt: skip

    assert listed == tiny_tokenizer().encode(prompt, add_special_tokens=False).ids
    assert tokens(answer) == alone(listed, 8)
