"""Does the sampler treat every row by its own request, at all edges of the parameters?"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sampling import SamplerBench, sample_ids
from tokamak.core.request import SamplingParams

VOCAB = 1500


def random_logits(rows, vocab=VOCAB, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-8, 1e-4, 0.3, 0.7, 1.0, 2.0, 100.0]),
    top_p=st.sampled_from([0.0, 1e-9, 1e-4, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 50, 255, 256, 257, 700, VOCAB, VOCAB + 1]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1e-9, 1e9, 1.2]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100)),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_tokens=st.integers(0, 4),
    logprobs=st.none() | st.integers(0, 5),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(params_strategy, min_size=1, max_size=7), st.integers(0, 2**20), st.randoms())
def test_a_row_gets_the_same_alone_and_in_any_batch(requests, seed, shuffle):
    rows = len(requests)
    # Few distinct scores in some rows: ties everywhere.
    logits = random_logits(rows, seed=seed)
    logits[::2] = logits[::2].round()
    histories = [[row + 1] * (row + 2) + [3, 4] for row in range(rows)]
    order = list(range(rows))
    shuffle.shuffle(order)
    stop_ids = frozenset({2, 9})

    alone = [
        SamplerBench(
            [requests[row]], vocab=VOCAB, histories=[histories[row]], stop_ids=stop_ids
        ).sample(logits[row : row + 1])
        for row in range(rows)
    ]
    together = SamplerBench(
        [requests[row] for row in order],
        vocab=VOCAB,
        histories=[histories[row] for row in order],
        stop_ids=stop_ids,
        slots=order,
    ).sample(logits[order])

    for place, row in enumerate(order):
        assert together.token_ids[place] == alone[row].token_ids[0]
        entry, lone = together.logprobs[place], alone[row].logprobs[0]
        assert (entry is None) == (lone is None)
        if entry is not None and lone is not None:
            np.testing.assert_array_equal(entry.token_ids, lone.token_ids)
            np.testing.assert_allclose(entry.logprobs, lone.logprobs, atol=1e-5)
            assert entry.rank == lone.rank
    assert not together.errors


GREEDY_WAYS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1e-8),
    SamplingParams(temperature=1e-6),
    SamplingParams(top_p=0.0),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=1e-4),
    SamplingParams(top_k=1),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=2.0, top_k=1),
]


@pytest.mark.parametrize("scale", [0.001, 3.0])
def test_every_way_to_ask_for_the_likeliest_token_gives_it(scale):
    logits = random_logits(len(GREEDY_WAYS), scale=scale)

    assert sample_ids(GREEDY_WAYS, logits) == logits.argmax(dim=1).tolist()


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(len(GREEDY_WAYS), VOCAB)
    logits[:, [11, 700, 1499]] = 2.0

    assert sample_ids(GREEDY_WAYS, logits) == [11] * len(GREEDY_WAYS)


EDGES = [
    *(SamplingParams(temperature=t, seed=1) for t in (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 2.0, 100.0)),
    *(SamplingParams(top_p=p, seed=1) for p in (0.0, 1e-9, 1e-4, 1.0)),
    *(SamplingParams(top_k=k, seed=1) for k in (-1, 0, 1, VOCAB, VOCAB + 1, 2**40)),
    *(SamplingParams(min_p=p, seed=1) for p in (0.0, 1.0)),
    *(SamplingParams(repetition_penalty=p, seed=1) for p in (1e-9, 1e9, 1e-300, 1e300)),
    SamplingParams(repetition_penalty=1e-9, temperature=1e-4, top_p=0.9, seed=1),
]


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_edge_values_give_a_token_alone_and_all_in_one_batch(scale):
    logits = random_logits(len(EDGES), scale=scale)
    histories = [[1, 2, 3]] * len(EDGES)

    bench = SamplerBench(EDGES, vocab=VOCAB, histories=histories)
    sampled = bench.sample(logits)
    alone = [
        sample_ids([params], logits[row : row + 1], histories=[[1, 2, 3]])[0]
        for row, params in enumerate(EDGES)
    ]

    assert not sampled.errors
    assert sampled.token_ids.tolist() == alone
    assert all(0 <= token < VOCAB for token in alone)


def test_settings_that_are_off_leave_plain_sampling_alone():
    logits = random_logits(1).expand(5, -1)
    off = [
        SamplingParams(seed=3),
        SamplingParams(seed=3, top_k=-1),
        SamplingParams(seed=3, top_k=VOCAB),
        SamplingParams(seed=3, top_k=VOCAB + 1),
        SamplingParams(seed=3, top_p=1.0, min_p=0.0),
    ]

    assert len(set(sample_ids(off, logits))) == 1


def test_a_very_low_temperature_takes_the_likeliest_token():
    logits = random_logits(3)

    ids = sample_ids([SamplingParams(temperature=1e-4)] * 3, logits)

    assert ids == logits.argmax(dim=1).tolist()


def test_a_seed_gives_the_same_tokens_among_strangers_and_in_other_slots():
    params = SamplingParams(seed=7)
    logits = [random_logits(8, seed=step) for step in range(16)]

    alone = SamplerBench([params], vocab=VOCAB)
    crowd = SamplerBench([SamplingParams()] * 3 + [params] + [SamplingParams()] * 4, vocab=VOCAB)
    first = [alone.step(step[3:4]).token_ids[0].item() for step in logits]
    second = [crowd.step(step).token_ids[3].item() for step in logits]

    assert first == second
    assert len(set(first)) > 8


def test_siblings_differ_and_the_first_is_what_one_alone_gets():
    logits = random_logits(4)[:1]
    params = SamplingParams(seed=7, n=4)

    siblings = SamplerBench([params] * 4, vocab=VOCAB, siblings=[0, 1, 2, 3])
    texts = np.array([siblings.step(logits.expand(4, -1)).token_ids.tolist() for _ in range(12)]).T
    alone = SamplerBench([SamplingParams(seed=7)], vocab=VOCAB)
    text = [alone.step(logits).token_ids.tolist()[0] for _ in range(12)]

    assert len({tuple(ids) for ids in texts.tolist()}) == 4
    assert texts[0].tolist() == text


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_every_seed_can_be_used_and_repeated(seed):
    logits = random_logits(1)

    first, second = (
        [bench.step(logits).token_ids.item() for _ in range(12)]
        for bench in (SamplerBench([SamplingParams(seed=seed)], vocab=VOCAB) for _ in range(2))
    )

    assert first == second


def test_unseeded_requests_differ_but_go_on_alike_when_admitted_again():
    logits = random_logits(1).expand(2, -1)

    texts = [
        np.array([bench.step(logits).token_ids.tolist() for _ in range(12)]).T.tolist()
        for bench in (
            SamplerBench([SamplingParams()] * 2, vocab=VOCAB, entropy=entropy)
            for entropy in (b"one", b"one", b"two")
        )
    ]

    assert texts[0][0] != texts[0][1]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize(
    ("value", "word"), [(float("nan"), "nan"), (float("inf"), "inf")], ids=["nan", "inf"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_scores_fail_their_row_alone(value, word, temperature):
    requests = [SamplingParams(temperature=temperature, seed=1, logprobs=1)] * 3
    logits = random_logits(3)
    expected = sample_ids(requests, logits)
    logits[1, 77] = value

    sampled = SamplerBench(requests, vocab=VOCAB).sample(logits)

    assert list(sampled.errors) == [1]
    assert word in sampled.errors[1]
    assert sampled.logprobs[1] is None
    assert sampled.token_ids.tolist() == [expected[0], 0, expected[2]]


def test_a_released_slot_serves_its_next_request_from_scratch():
    bench = SamplerBench([SamplingParams(logit_bias={5: 100.0}, temperature=0.0)], vocab=VOCAB)
    logits = random_logits(1)
    likeliest = int(logits.argmax())

    biased = bench.sample(logits).token_ids.item()
    bench.sampler.release(0)
    bench.sampler.admit(
        0,
        request_id="next",
        params=SamplingParams(temperature=0.0),
        sibling=0,
        max_tokens=5,
        stop_ids=frozenset(),
        prompt_tokens=1,
        output_ids=[],
    )

    assert biased == 5
    assert bench.sample(logits).token_ids.item() == likeliest


def test_min_tokens_keeps_an_eager_request_from_ending():
    logits = random_logits(1)
    logits[0, 2] = 50.0
    params = SamplingParams(temperature=0.0, min_tokens=3)

    bench = SamplerBench([params], vocab=VOCAB, stop_ids=frozenset({2}))
    ids = [bench.step(logits).token_ids.item() for _ in range(5)]

    assert [token == 2 for token in ids] == [False, False, False, True, True]


def test_token_ids_are_int32_and_a_step_without_rows_is_a_step():
    sampled = SamplerBench([], vocab=VOCAB).sample(torch.empty(0, VOCAB))

    assert sampled.token_ids.dtype == torch.int32
    assert sampled.token_ids.shape == (0,)
    assert sampled.logprobs == ()
