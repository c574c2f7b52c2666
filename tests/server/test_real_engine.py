"""Does the server keep its promises over the real engine process, with a tiny model?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.live_server import data_of, eventually, serving_engine, stream_events
from tests.support.tiny import write_checkpoint
from tokamak.config.options import EngineOptions
from tokamak.engine.configure import configure
from tokamak.engine.process_client import start_engine

BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
CONTEXT_TOKENS = 512


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    config = configure(
        EngineOptions(
            model=str(folder),
            served_model_name="tiny",
            dtype="float32",
            max_num_batched_tokens=CHUNK_TOKENS,
            block_size=BLOCK_TOKENS,
            max_num_seqs=8,
            num_blocks_override=400,
            threads=1,
        )
    )
    with serving_engine(lambda: start_engine(config)) as live:
        yield live


@pytest.fixture(autouse=True)
def _everything_comes_back(tiny):
    """After every test: nothing runs, and every block is free."""
    yield
    eventually(lambda: tiny.metric("tokamak_running_requests") == 0)
    eventually(lambda: tiny.metric("tokamak_waiting_requests") == 0)
    eventually(
        lambda: (
            tiny.metric("tokamak_cache_free_blocks") == tiny.metric("tokamak_cache_total_blocks")
        )
    )


def ids(count, seed):
    """Pseudo-random ids of ordinary tokens."""
    value, made = seed * 7919 + 13, []
    for _ in range(count):
        value = (value * 1103515245 + 12345) % 2**31
        made.append(3 + value % 250)
    return made


def greedy(server, prompt, **fields):
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = server.complete(prompt, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def reset(server):
    assert server.http.post("/reset_prefix_cache").status_code == 200


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_prompt_whose_every_block_is_cached_gives_the_same_answer(tiny, blocks):
    prompt = ids(blocks * BLOCK_TOKENS, 3)
    reset(tiny)

    cold = greedy(tiny, prompt, max_tokens=8)
    warm = greedy(tiny, prompt, max_tokens=8)
    shorter = greedy(tiny, prompt[:-1], max_tokens=8)
    longer = greedy(tiny, [*prompt, 50], max_tokens=8)
    reset(tiny)
    cold_shorter = greedy(tiny, prompt[:-1], max_tokens=8)

    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert tokens(cold) == tokens(warm)
    assert tokens(shorter) == tokens(cold_shorter)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 <= cached <= len(prompt) - 1
    assert cached > 0 or blocks == 1
    assert longer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt)


def test_chunk_and_block_edges_change_no_token_alone_or_together(tiny):
    lengths = [1, 15, 16, 17, 63, 64, 65, 79, 80, 127, 128, 129, 191, 192, 193]
    prompts = [ids(length, length) for length in lengths]
    reset(tiny)
    alone = [tokens(greedy(tiny, prompt, max_tokens=8)) for prompt in prompts]
    reset(tiny)

    with ThreadPoolExecutor(17) as pool:
        busy = [pool.submit(greedy, tiny, ids(20, 90 + at), max_tokens=300) for at in range(2)]
        answers = list(pool.map(lambda p: tokens(greedy(tiny, p, max_tokens=8)), prompts))
        assert all(len(tokens(future.result())) == 300 for future in busy)

    assert answers == alone


@pytest.mark.parametrize("length", [BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 33])
def test_prompt_logprobs_are_the_same_whatever_is_cached(tiny, length):
    first = ids(length, 1)
    second = first[:BLOCK_TOKENS] + ids(BLOCK_TOKENS, 2)
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1}
    reset(tiny)

    seen = {}
    for name, prompt in [("a", first), ("b", second), ("a", first), ("b", second), ("a", first)]:
        entries = greedy(tiny, prompt, **fields)["choices"][0]["logprobs"]
        assert len(entries["tokens"]) == len(prompt) + 1
        assert entries["token_logprobs"][0] is None
        values = entries["token_logprobs"][1:]
        before = seen.setdefault(name, values)
        assert values == pytest.approx(before, abs=1e-3)


def test_the_longest_prompt_and_nothing_to_generate(tiny):
    for length, max_tokens, generated in [(510, 2, 2), (511, 1, 1), (512, 0, 0)]:
        answer = greedy(tiny, ids(length, 5), max_tokens=max_tokens, echo=True, logprobs=1)
        assert answer["usage"]["completion_tokens"] == generated
        assert answer["choices"][0]["finish_reason"] == "length"
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == length + generated
        assert tokens(answer) == [] or max_tokens > 0
    refused = tiny.complete(ids(512, 5), max_tokens=1)
    assert refused.status_code == 400
    assert "512" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_to_generate_echoes_a_text_prompt(tiny, stream):
    body = {"echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}

    answer = tiny.complete("Hello world", **body)

    events = stream_events(answer) if stream else [answer.json()]
    entries = [e["choices"][0]["logprobs"]["tokens"] for e in events]
    assert "".join(e["choices"][0]["text"] for e in events) == "Hello world"
    assert "".join(token for part in entries for token in part) == "Hello world"


def test_siblings_are_samples_and_seeds_repeat_them_beside_strangers(tiny):
    body = {"n": 4, "temperature": 1, "seed": 7, "max_tokens": 16, "ignore_eos": True}
    fields = {"return_token_ids": True}
    first = tiny.complete("Hello", **body, **fields).json()
    one = tiny.complete("Hello", **{**body, "n": 1}, **fields).json()
    with ThreadPoolExecutor(8) as pool:
        strangers = [
            pool.submit(tiny.complete, f"What {at}", max_tokens=24, temperature=1)
            for at in range(7)
        ]
        again = tiny.complete("Hello", **body, **fields).json()
        assert all(s.result().status_code == 200 for s in strangers)

    texts = [choice["token_ids"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len({tuple(text) for text in texts}) > 1
    assert [choice["token_ids"] for choice in again["choices"]] == texts
    assert one["choices"][0]["token_ids"] == texts[0]
    assert first["usage"]["completion_tokens"] == 64
    assert first["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_every_64_bit_seed_is_taken_and_repeats(tiny, seed):
    body = {"temperature": 1, "seed": seed, "max_tokens": 6}

    answers = [tiny.complete("Hello", **body).json()["choices"][0]["text"] for _ in range(2)]

    assert answers[0] == answers[1]


EDGES = [
    *({"temperature": value} for value in (0, 1e-8, 1e-6, 1e-4, 2)),
    *({"top_p": value} for value in (1e-9, 1e-4, 0, 1)),
    *({"top_k": value} for value in (-1, 0, 1, 320, 321)),
    *({"min_p": value} for value in (0, 1)),
    *({"repetition_penalty": value} for value in (1e-9, 1e9)),
]
GREEDY_EDGES = [
    {"temperature": 0},
    {"temperature": 1e-8},
    {"temperature": 1e-6},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"top_p": 1e-4},
    {"top_p": 0},
    {"min_p": 1},
]


def test_edge_values_give_tokens_alone_and_in_one_batch(tiny):
    fixed = {"max_tokens": 20, "ignore_eos": True, "return_token_ids": True, "seed": 11}
    expected = tokens(greedy(tiny, "The capital", max_tokens=20))

    def ask(edge):
        answer = tiny.complete("The capital", **{**fixed, **edge})
        assert answer.status_code == 200, answer.text
        return tokens(answer.json())

    alone = [ask(edge) for edge in EDGES]
    with ThreadPoolExecutor(len(EDGES)) as pool:
        together = list(pool.map(ask, EDGES))

    assert all(len(made) == 20 for made in alone)
    assert together == alone
    assert [edge for edge in GREEDY_EDGES if ask(edge) != expected] == []


def test_greedy_chat_logprobs_name_the_chosen_token_first_and_stream_alike(tiny):
    body = {"temperature": 0, "logprobs": True, "top_logprobs": 3, "max_tokens": 24}
    body["ignore_eos"] = True

    whole = tiny.chat("What is the capital", **body).json()["choices"][0]["logprobs"]["content"]
    events = stream_events(tiny.chat("What is the capital", stream=True, **body))

    streamed = [
        entry
        for event in events
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert len(whole) == 24
    for entry, other in zip(whole, streamed, strict=True):
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
        assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert [a["bytes"] for a in entry["top_logprobs"]] == [
            a["bytes"] for a in other["top_logprobs"]
        ]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8, 13, 24])
def test_deltas_join_to_the_text_wherever_it_is_cut(tiny, max_tokens):
    body = {"temperature": 1, "seed": max_tokens, "max_tokens": max_tokens, "ignore_eos": True}
    prompt = "Repeat exactly: ďábel 你好 👩‍🚀 𝄞 ﷽"

    whole = tiny.chat(prompt, **body).json()
    deltas = [
        event["choices"][0]["delta"].get("content", "")
        for event in stream_events(tiny.chat(prompt, stream=True, **body))
    ]

    assert "".join(deltas) == whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == max_tokens


def test_a_schema_gives_text_that_fits_it(tiny):
    constraint = {"json": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}},
                           "required": ["a"], "additionalProperties": False}}  # fmt: skip

    answers = [
        tiny.chat("Hello", structured_outputs=constraint, temperature=1, seed=seed, max_tokens=40)
        for seed in range(4)
    ]

    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert {text.replace(" ", "") for text in texts} <= {'{"a":"x"}', '{"a":"y"}'}


def test_clients_that_leave_give_everything_back_within_a_second(tiny):
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "ignore_eos": True,
        "max_tokens": 450,
        "stream": True,
        "n": 3,
        "temperature": 1,
    }

    def leave_after_first(_: int) -> None:
        with tiny.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(data_of(answer.iter_lines()))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave_after_first, range(8)))

    eventually(lambda: tiny.metric("tokamak_running_requests") == 0, within_s=1.0)
    assert tiny.chat(max_tokens=2).status_code == 200


def test_a_running_stream_is_not_disturbed_by_bad_requests(tiny):
    body = {"prompt": "Hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    alone = tiny.http.post("/v1/completions", json=body).json()["choices"][0]["text"]

    def read():
        with tiny.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            answer.read()
            return stream_events(answer)

    got = tiny.beside(read)
    statuses = {
        tiny.chat(logit_bias={"420": 5}).status_code,
        tiny.complete([320]).status_code,
        tiny.chat(response_format={"type": "json_schema"}).status_code,
        tiny.complete(ids(600, 1)).status_code,
    }

    assert statuses == {400}
    assert "".join(event["choices"][0]["text"] for event in got.result(60)) == alone
