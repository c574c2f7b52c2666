"""Does the way taken on a device give the tokens and errors of the host's, without looking at a number?

The device's way also runs where the scores are in the host's memory, so it is compared here with the other. That it
waits for nothing is shown with tensors that have no numbers: whoever asks for one gets an error.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.preparation import a_decode_plan
from tests.support.sampling import EOS_ID, SamplerBench, a_grammar_factory, structured, vocab_tokens
from tests.unit.sampling.test_sampler import params_strategy, random_logits
from tokamak.core.request import SamplingParams
from tokamak.device.waits import HostWaits
from tokamak.ops.sample import uniforms_of
from tokamak.ops.sample.reference import SORTED_ROWS
from tokamak.runner.results import InFlightResult
from tokamak.sampling import scan
from tokamak.sampling.noise import uniforms
from tokamak.sampling.sampler import Sampler, bad_peaks

VOCAB = 1500
LARGE_VOCAB = 9000
"""More than the most candidates that are looked at before the whole row is."""

SEEDS = [SamplingParams(seed=seed, temperature=0.8) for seed in range(3)]
CUTS = [
    SamplingParams(seed=1, top_k=7),
    SamplingParams(seed=2, top_k=300, top_p=0.9),
    SamplingParams(seed=3, top_k=5000, min_p=1e-4),
    SamplingParams(seed=4, top_p=0.5),
    SamplingParams(seed=5, top_p=0.999),
    SamplingParams(seed=6, min_p=0.01),
    SamplingParams(seed=7, top_p=0.95, min_p=1e-6, temperature=1.7),
]
PENALTIES = [
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(seed=1, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(temperature=0.0, logit_bias={5: 3.0, 9: -4.0}),
    SamplingParams(seed=9, min_tokens=4, stop_token_ids=[3]),
]
GREEDY = [SamplingParams(temperature=0.0)] * 2


def both_ways(monkeypatch, bench, logits):
    """A step on the host, and the same step as a device takes it."""
    host = bench.sample(logits)
    with monkeypatch.context() as patch:
        patch.setattr(scan, "is_on_host", lambda scores: False)
        device = bench.sample(logits)
    return host, device


@pytest.mark.parametrize(
    "requests",
    [GREEDY, SEEDS, CUTS, PENALTIES, [*GREEDY, *SEEDS, *CUTS, *PENALTIES]],
    ids=["greedy", "whole", "cut", "penalised", "mixed"],
)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [VOCAB, LARGE_VOCAB])
def test_a_device_chooses_the_tokens_of_the_host(monkeypatch, requests, ties, vocab):
    logits = random_logits(len(requests), vocab, seed=4)
    logits = logits.round() if ties else logits
    histories = [[row + 1] * (row + 2) for row in range(len(requests))]
    bench = SamplerBench(requests, vocab=vocab, histories=histories, stop_ids=frozenset({2}))

    host, device = both_ways(monkeypatch, bench, logits)

    assert device.token_ids.tolist() == host.token_ids.tolist()
    assert device.peaks is not None
    assert host.peaks is None


def test_many_rows_that_are_sorted_whole_are_taken_part_by_part(monkeypatch):
    requests = [SamplingParams(seed=row, top_p=0.9) for row in range(SORTED_ROWS + 70)]
    logits = random_logits(len(requests), 300)

    host, device = both_ways(monkeypatch, SamplerBench(requests, vocab=300), logits)

    assert device.token_ids.tolist() == host.token_ids.tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(params_strategy, min_size=1, max_size=6), st.integers(0, 2**20))
def test_any_parameters_give_the_same_tokens_both_ways(requests, seed):
    logits = random_logits(len(requests), seed=seed)
    logits[::2] = logits[::2].round()
    histories = [[row + 1] * (row + 2) for row in range(len(requests))]
    bench = SamplerBench(requests, vocab=VOCAB, histories=histories, stop_ids=frozenset({2, 9}))

    with pytest.MonkeyPatch.context() as patch:
        host, device = both_ways(patch, bench, logits)

    assert device.token_ids.tolist() == host.token_ids.tolist()


def test_scores_in_bfloat16_are_searched_as_they_are_and_drawn_from_in_float32(monkeypatch):
    requests = [*GREEDY, *SEEDS, *CUTS]
    logits = random_logits(len(requests)).bfloat16()
    bench = SamplerBench(requests, vocab=VOCAB)

    narrow, wide = bench.sample(logits), bench.sample(logits.float())
    _, plain = both_ways(monkeypatch, SamplerBench(GREEDY, vocab=VOCAB), logits[:2])

    assert narrow.token_ids.tolist() == wide.token_ids.tolist()
    assert plain.token_ids.tolist() == wide.token_ids[:2].tolist()


BAD = {0: float("nan"), 1: float("inf"), 2: float("-inf")}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        *CUTS,
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, logprobs=2),
    ],
    ids=repr,
)
def test_unusable_scores_are_errors_of_their_rows_when_they_arrive(monkeypatch, params):
    logits = random_logits(4)
    for row, value in BAD.items():
        logits[row, 7 if row < 2 else slice(None)] = value
    bench = SamplerBench([params] * 4, vocab=VOCAB)
    plan = a_decode_plan([1, 1, 1, 1])

    with torch.inference_mode():
        host, device = both_ways(monkeypatch, bench, logits)
    first = InFlightResult.launch(plan, host, {}, HostWaits()).take()
    second = InFlightResult.launch(plan, device, {}, HostWaits()).take()

    errors = [row.error for row in second.rows]
    assert errors == [row.error for row in first.rows]
    assert errors[:3] == [
        "the model's scores hold nan",
        "the model's scores hold inf",
        "no token is allowed: every one is ruled out",
    ]
    assert not errors[3]
    assert [row.token_ids for row in second.rows] == [row.token_ids for row in first.rows]


def test_an_error_known_before_is_not_replaced_by_what_the_peaks_say(monkeypatch):
    # Without a grammar factory, structured output is an error of its own.
    requests = [structured("json_object"), SamplingParams(temperature=0.0)]
    logits = random_logits(2)
    logits[0, 3] = float("nan")
    bench = SamplerBench(requests, vocab=VOCAB)

    _, device = both_ways(monkeypatch, bench, logits)
    rows = InFlightResult.launch(a_decode_plan([1, 1]), device, {}, HostWaits()).take().rows

    assert "structured output is not available" in rows[0].error
    assert not rows[1].error


def test_grammars_and_logprobs_look_at_once(monkeypatch):
    vocab = vocab_tokens()
    requests = [structured("regex", "[ab]+"), SamplingParams(temperature=0.0, logprobs=1)]
    for request in requests:
        bench = SamplerBench(
            [request], vocab=vocab, grammar=a_grammar_factory(), stop_ids=frozenset({EOS_ID})
        )
        logits = random_logits(1, vocab)

        host = bench.sample(logits)
        with monkeypatch.context() as patch:
            patch.setattr(scan, "is_on_host", lambda scores: False)
            fresh = SamplerBench(
                [request], vocab=vocab, grammar=a_grammar_factory(), stop_ids=frozenset({EOS_ID})
            )
            device = fresh.sample(logits)

        assert device.peaks is None
        assert device.token_ids.tolist() == host.token_ids.tolist()


def test_a_slot_taken_again_draws_with_its_new_parameters(monkeypatch):
    bench = SamplerBench([SamplingParams(seed=1, temperature=0.3)], vocab=VOCAB)
    logits = random_logits(1)
    bench.sampler.admit(
        0,
        request_id="second",
        params=SamplingParams(seed=8, temperature=2.0, top_k=40),
        sibling=3,
        max_tokens=9,
        stop_ids=frozenset(),
        prompt_tokens=1,
        output_ids=(),
    )

    for _ in range(20):
        host, device = both_ways(monkeypatch, bench, logits)
        bench.positions = bench.positions + np.int32(1)
        assert device.token_ids.tolist() == host.token_ids.tolist()


def test_a_greedy_request_in_a_slot_that_drew_gets_the_likeliest_token(monkeypatch):
    requests = [SamplingParams(seed=1, temperature=5.0), SamplingParams(seed=2)]
    bench = SamplerBench(requests, vocab=VOCAB)
    logits = random_logits(2)
    bench.sampler.release(0)
    bench.sampler.admit(
        0,
        request_id="greedy",
        params=SamplingParams(temperature=0.0),
        sibling=0,
        max_tokens=9,
        stop_ids=frozenset(),
        prompt_tokens=1,
        output_ids=(),
    )

    host, device = both_ways(monkeypatch, bench, logits)

    assert device.token_ids[0] == logits[0].argmax()
    assert device.token_ids.tolist() == host.token_ids.tolist()


def test_a_device_has_the_random_numbers_of_the_host():
    chance = np.random.default_rng(3)
    keys = chance.integers(0, 2**64, 5000, dtype=np.uint64)
    keys[:3] = 0, 2**63, 2**64 - 1
    positions = chance.integers(0, 2**20, 5000).astype(np.int32)

    found = uniforms_of(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions))

    np.testing.assert_array_equal(found.numpy(), uniforms(keys, positions))


def test_peaks_that_are_numbers_are_no_errors():
    assert bad_peaks(np.array([0.0, -3e38, 3e38], np.float32)) == {}


# --- without numbers -----------------------------------------------------------------------------


def sample_without_numbers(monkeypatch, requests, *, vocab=VOCAB, waits=None):
    """A step over tensors on a device that holds no numbers."""
    device = torch.device("meta")

    def staged(values, device):
        return torch.empty(values.shape, dtype=torch.from_numpy(values).dtype, device=device)

    for module in ("sampler", "stages", "slot_table", "device_table"):
        monkeypatch.setattr(f"tokamak.sampling.{module}.staged", staged)
    rows = len(requests)
    sampler = Sampler(
        vocab_tokens=vocab,
        slots=rows,
        device=device,
        grammar=None,
        waits=waits,
    )
    for slot, params in enumerate(requests):
        sampler.admit(
            slot,
            request_id=f"request-{slot}",
            params=params,
            sibling=0,
            max_tokens=100,
            stop_ids=frozenset({2}),
            prompt_tokens=2,
            output_ids=(),
        )
    slots, positions = np.arange(rows, dtype=np.int32), np.full(rows, 5, np.int32)
    where = torch.empty(2, rows, dtype=torch.int32, device=device)
    return sampler.sample(
        torch.empty(rows, vocab, device=device),
        slots,
        positions,
        torch.empty(rows, 64, dtype=torch.int32, device=device),
        (where[0], where[1]),
    )


@pytest.mark.parametrize(
    "requests",
    [GREEDY, SEEDS, CUTS, PENALTIES, [*GREEDY, *SEEDS, *CUTS, *PENALTIES]],
    ids=["greedy", "whole", "cut", "penalised", "mixed"],
)
def test_tokens_are_chosen_without_a_look_at_a_number(monkeypatch, requests):
    waits = HostWaits()

    sampled = sample_without_numbers(monkeypatch, requests, waits=waits)

    assert sampled.token_ids.shape == (len(requests),)
    assert sampled.token_ids.is_meta
    assert sampled.peaks is not None
    assert not sampled.errors
    assert waits.host_waits == 0


def test_a_look_at_a_number_would_be_an_error(monkeypatch):
    """The test above can fail: log-probabilities must look, and are counted."""
    waits = HostWaits()

    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        sample_without_numbers(
            monkeypatch, [SamplingParams(temperature=0.0, logprobs=1)], waits=waits
        )

    assert waits.host_waits == 1
