"""Does a request get the oracle's tokens whatever runs beside it, however it is cut and whatever is cached?

The whole engine on a tiny model in float32, compared token for token with the single-request oracle.
Case numbers are those of the public bug reports the inputs come from.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.oracle import Oracle
from tests.support.tiny import VOCAB_TOKENS, write_checkpoint
from tokamak.core.request import FinishReason, SamplingParams, StructuredOutput
from tokamak.errors import ContextLengthError, GrammarError, RequestError
from tokamak.llm import LLM

BLOCK = 16
CONTEXT = 512
ROOM = 70
"""Blocks that hold everything these tests run at once."""

RECORDED = {"graphs": "startup", "req_graph_sizes": (1, 2, 4), "token_graph_sizes": (16,)}
"""Steps replay where a size is recorded, which here is most of them; the rest run eagerly."""

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def ids(count: int, seed: int) -> list[int]:
    """Pseudo-random token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(20, VOCAB_TOKENS - 10, count).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


@pytest.fixture
def make_llm(folder):
    made = []

    def make(**options):
        settings = {
            "dtype": "fp32",
            "max_model_len": CONTEXT,
            "block_size": BLOCK,
            "threads": 1,
            **RECORDED,
        }
        made.append(LLM(str(folder), **{"num_blocks_override": ROOM, **settings, **options}))
        return made[-1]

    yield make
    for llm in made:
        stats = llm.stats()
        assert (stats.running_requests, stats.waiting_requests) == (0, 0)
        assert stats.free_blocks == stats.total_blocks
        llm.close()


def token_ids(outputs):
    return [list(output.token_ids) for output in outputs]


CHUNK_EDGES = [1, 15, 16, 17, 63, 64, 65, 79, 80, 127, 128, 129, 191, 192, 193]


@pytest.mark.parametrize("reuse", [True, False], ids=["prefix-cache", "no-prefix-cache"])
def test_chunks_that_meet_block_edges_change_nothing(make_llm, oracle, reuse):  # case 11
    prompts = [ids(count, count) for count in CHUNK_EDGES]
    expected = [oracle.generate(prompt, 8).token_ids for prompt in prompts]
    llm = make_llm(max_num_batched_tokens=64, enable_prefix_caching=reuse, num_blocks_override=200)

    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    long_decodes = [ids(9, 900), ids(30, 901)]
    together = llm.generate(
        long_decodes + prompts,
        [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 2 + [GREEDY] * 15,
    )

    assert token_ids(alone) == expected
    assert token_ids(together[2:]) == expected
    for prompt, output in zip(long_decodes, together, strict=False):
        assert list(output.token_ids) == oracle.generate(prompt, 40).token_ids


def test_a_prompt_whose_every_block_is_cached_still_computes_a_token(make_llm, oracle):  # case 10
    llm = make_llm()
    prompts = [ids(count, 3) for count in (BLOCK, 2 * BLOCK, 4 * BLOCK)]
    variants = [[p, p[:-1], [*p, 77]] for p in prompts]
    expected = {tuple(p): oracle.generate(p, 8).token_ids for p in itertools.chain(*variants)}

    for same, shorter, longer in variants:
        first, second = llm.generate(same, GREEDY)[0], llm.generate(same, GREEDY)[0]
        assert list(first.token_ids) == list(second.token_ids) == expected[tuple(same)]
        assert second.usage.cached_tokens <= len(same) - 1
        assert second.usage.cached_tokens > 0 or len(same) == BLOCK
        for other in (shorter, longer):
            assert list(llm.generate(other, GREEDY)[0].token_ids) == expected[tuple(other)]
    everything = list(itertools.chain(*variants))
    outputs = llm.generate(everything, GREEDY)

    assert token_ids(outputs) == [expected[tuple(p)] for p in everything]


def test_prompt_logprobs_are_the_same_with_a_warm_cache(make_llm, oracle):  # case 7
    llm = make_llm()
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    p = ids(2 * BLOCK + 1, 1)
    q = p[:BLOCK] + ids(BLOCK, 2)
    edges = [ids(count, 4) for count in (BLOCK - 1, BLOCK, BLOCK + 1)]

    for prompt in (p, q, p, q, p, *edges, *edges):
        output = llm.generate(prompt, scored)[0]
        entries = output.prompt_logprobs
        assert entries is not None
        assert len(entries) == len(prompt)
        assert entries[0] is None
        table = oracle.scores(prompt).log_softmax(-1)
        for at, entry in enumerate(entries[1:], 1):
            assert entry.chosen.token_id == prompt[at]
            assert entry.chosen.logprob == pytest.approx(float(table[at - 1, prompt[at]]), abs=1e-3)
            best = entry.top[0]
            assert best.logprob == pytest.approx(float(table[at - 1].max()), abs=1e-3)


def test_prompt_logprobs_survive_chunks_and_preemption(make_llm, oracle):
    llm = make_llm(max_num_batched_tokens=32, num_blocks_override=14, max_model_len=200)
    scored = SamplingParams(temperature=0, max_tokens=60, prompt_logprobs=0, ignore_eos=True)
    prompts = [ids(50 + at, at) for at in range(4)]

    outputs = llm.generate(prompts, scored)

    assert llm.stats().preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        table = oracle.scores(prompt).log_softmax(-1)
        expected = [float(table[at - 1, prompt[at]]) for at in range(1, len(prompt))]
        given = [entry.chosen.logprob for entry in output.prompt_logprobs[1:]]
        assert given == pytest.approx(expected, abs=1e-3)
        assert list(output.token_ids) == oracle.generate(prompt, 60).token_ids


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "expected"),
    [
        (126, None, 2),
        (126, 1, 1),
        (126, 2, 2),
        (126, 200, ContextLengthError),
        (127, None, 1),
        (127, 1, 1),
        (127, 2, ContextLengthError),
        (128, None, ContextLengthError),
        (128, 1, ContextLengthError),
        (128, 0, 0),
        (129, None, ContextLengthError),
        (129, 0, ContextLengthError),
    ],
)
def test_prompts_at_the_edge_of_the_context(make_llm, prompt_tokens, max_tokens, expected):  # 12
    llm = make_llm(max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    if expected is ContextLengthError:
        with pytest.raises(ContextLengthError, match=rf"{prompt_tokens}.*128"):
            llm.generate(ids(prompt_tokens, 1), params)
        return
    output = llm.generate(ids(prompt_tokens, 1), params)[0]

    assert len(output.token_ids) == expected
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("share", [0.4, 0.25])
def test_preemption_changes_no_token(make_llm, share):  # case 14
    shared = ids(64, 5)
    prompts = [shared + ids(40 + 13 * at % 81, at) for at in range(32)]
    params = [
        SamplingParams(temperature=0, max_tokens=60 + 7 * at % 81, ignore_eos=True)
        for at in range(32)
    ]
    plenty = make_llm(num_blocks_override=600, max_num_seqs=32, max_model_len=400)
    expected = token_ids(plenty.generate(prompts, params))
    peak = 4 + sum(
        -(-(len(p) + q.max_tokens) // BLOCK) - 4 for p, q in zip(prompts, params, strict=True)
    )
    tight = make_llm(num_blocks_override=int(share * peak), max_num_seqs=32, max_model_len=400)

    outputs = tight.generate(prompts, params)

    assert token_ids(outputs) == expected
    assert [len(output.token_ids) for output in outputs] == [p.max_tokens for p in params]
    assert plenty.stats().preemptions == 0
    assert tight.stats().preemptions > 0
    assert tight.stats().preemptions <= 9 * len(prompts)


def test_seeded_samples_do_not_depend_on_strangers(make_llm):  # case 16
    llm = make_llm()
    prompt = ids(12, 8)
    seeded = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=16, ignore_eos=True)
    stranger = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)

    first = llm.generate(prompt, seeded)[0]
    second = llm.generate(prompt, seeded)[0]
    among = llm.generate([prompt, *(ids(9, at) for at in range(7))], [seeded, *[stranger] * 7])[0]
    one = llm.generate(
        prompt, SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True)
    )[0]

    texts = [list(output.token_ids) for output in first.outputs]
    assert [output.index for output in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(text) for text in texts}) > 1
    assert [list(output.token_ids) for output in second.outputs] == texts
    assert [list(output.token_ids) for output in among.outputs] == texts
    assert list(one.token_ids) == texts[0]
    assert first.usage.prompt_tokens == 12
    assert first.usage.completion_tokens == 64


def test_greedy_siblings_are_equal(make_llm):
    outputs = make_llm().generate(ids(5, 1), SamplingParams(n=4, temperature=0, max_tokens=6))

    assert len({output.token_ids for output in outputs[0].outputs}) == 1


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_every_64_bit_seed_is_taken(make_llm, seed):
    llm = make_llm()
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True)

    first, second = llm.generate([ids(4, 1), ids(4, 1)], params)

    assert first.token_ids == second.token_ids


EDGES = {
    "temperature": [0, 1e-8, 1e-6, 1e-4, 2.0],
    "top_p": [1e-9, 1e-4, 0.0, 1.0],
    "top_k": [-1, 0, 1, VOCAB_TOKENS, VOCAB_TOKENS + 1],
    "min_p": [0.0, 1.0],
    "repetition_penalty": [1e-9, 1e9],
}
SAME_AS_GREEDY = {
    ("temperature", 0), ("temperature", 1e-8), ("temperature", 1e-6), ("top_k", 1),
    ("top_p", 1e-9), ("top_p", 1e-4), ("top_p", 0.0), ("min_p", 1.0),
}  # fmt: skip


def test_edge_values_of_sampling_give_tokens_and_touch_no_neighbour(make_llm, oracle):  # case 17
    llm = make_llm()
    prompt = ids(10, 6)
    cases = [(name, value) for name, values in EDGES.items() for value in values]
    params = [
        SamplingParams(**{"temperature": 1.0, name: value}, max_tokens=20, ignore_eos=True, seed=at)
        for at, (name, value) in enumerate(cases)
    ]
    greedy = oracle.generate(prompt, 20).token_ids

    alone = [llm.generate(prompt, each)[0] for each in params]
    together = llm.generate([prompt] * len(params), params)

    assert token_ids(alone) == token_ids(together)
    for case, output in zip(cases, together, strict=True):
        assert len(output.token_ids) == 20, case
        assert output.text, case
        if case in SAME_AS_GREEDY:
            assert list(output.token_ids) == greedy, case


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -2),
        ("min_p", 1.1),
        ("top_p", 1.1),
        ("repetition_penalty", 0.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("seed", 2**63),
        ("logit_bias", {VOCAB_TOKENS: 1.0}),
        ("logit_bias", {5: 1e9}),
        ("stop", ("",)),
        ("n", 0),
        ("max_tokens", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name_and_nothing_else_runs_worse(
    make_llm, oracle, field, value
):
    llm = make_llm()

    with pytest.raises(RequestError, match=field) as caught:
        llm.generate(ids(4, 1), SamplingParams(**{"max_tokens": 4, field: value}))

    assert caught.value.field == field
    assert token_ids(llm.generate(ids(4, 1), GREEDY)) == [oracle.generate(ids(4, 1), 8).token_ids]


def test_the_chosen_token_is_the_first_alternative_under_greedy(make_llm):  # case 6
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=3, ignore_eos=True)

    output = make_llm().generate(ids(6, 2), params)[0]

    assert len(output.logprobs) == 24
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry.chosen.token_id == token_id == entry.top[0].token_id
        assert entry.rank == 1
        assert [a.logprob for a in entry.top] == sorted(
            (a.logprob for a in entry.top), reverse=True
        )


def test_leaving_a_stream_frees_the_request_at_once(make_llm):  # case 15
    llm = make_llm()
    stream = llm.stream(
        ids(40, 1), SamplingParams(n=3, temperature=0, max_tokens=400, ignore_eos=True)
    )
    next(stream)

    stream.close()

    stats = llm.stats()
    assert (stats.running_requests, stats.waiting_requests) == (0, 0)
    assert stats.free_blocks == stats.total_blocks
    assert len(llm.generate(ids(4, 1), GREEDY)[0].token_ids) == 8


def test_the_host_waits_once_a_step(make_llm):
    llm = make_llm()

    llm.generate([ids(30, at) for at in range(5)], GREEDY)

    stats = llm.stats()
    assert stats.host_waits == stats.steps > 0


def test_fifty_steps_of_arrivals_ends_cuts_and_preemptions_match_the_oracle(make_llm, oracle):
    llm = make_llm(
        max_num_batched_tokens=24, num_blocks_override=14, max_num_seqs=6, max_model_len=144
    )
    chance = np.random.default_rng(11)
    prompts = [ids(int(chance.integers(1, 90)), 100 + at) for at in range(20)]
    lengths = [int(chance.integers(1, 40)) for _ in prompts]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]

    outputs = llm.generate(prompts, params)

    assert llm.stats().steps >= 50
    assert llm.stats().preemptions > 0
    expected = [oracle.generate(p, n).token_ids for p, n in zip(prompts, lengths, strict=True)]
    assert token_ids(outputs) == expected


def test_a_schema_that_cannot_be_compiled_is_refused_before_anything_runs(make_llm):  # case 2
    llm = make_llm()
    bad = StructuredOutput(kind="json_schema", value='{"type": "objekt"}')

    with pytest.raises(GrammarError, match="objekt") as caught:
        llm.generate(ids(4, 1), SamplingParams(structured=bad))

    assert caught.value.field == "structured"
    assert llm.stats().steps == 0
