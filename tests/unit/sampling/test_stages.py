"""Does each stage change the logits of the rows that asked, and of no others?"""

import numpy as np
import pytest
import torch

from tests.support.sampling import SamplerBench
from tokamak.core.request import SamplingParams
from tokamak.sampling.slot_table import Rows, SlotTable
from tokamak.sampling.stages import (
    STAGES,
    History,
    add_bias,
    ban_early_end,
    penalise_presence,
    penalise_repetition,
)

VOCAB = 24


def staged(stage, requests, histories, prompt_tokens, *, stop_ids=frozenset(), logits=None):
    """The logits before and after a stage, as float64 arrays."""
    table = SlotTable(len(requests), VOCAB)
    for slot, params in enumerate(requests):
        table.set(
            slot,
            params,
            key=0,
            prompt_tokens=prompt_tokens[slot],
            stop_ids=stop_ids,
            grammar=None,
            error="",
        )
    token_ids = torch.zeros(len(requests), 64, dtype=torch.int32)
    for slot, known in enumerate(histories):
        token_ids[slot, : len(known)] = torch.tensor(known, dtype=torch.int32)
    rows = Rows(
        table,
        np.arange(len(requests), dtype=np.int32),
        np.array([len(known) for known in histories], np.int32),
    )
    if logits is None:
        logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.double().numpy().copy()
    history = History(token_ids)
    stage(logits, rows, history)
    if history.counts is not None:
        assert not history.counts.any()
    return before, logits.double().numpy()


def test_a_bias_is_added_to_its_tokens_alone():
    requests = [
        SamplingParams(),
        SamplingParams(logit_bias={3: 5.0, 23: -100.0}),
        SamplingParams(logit_bias={0: 0.5}),
    ]

    before, after = staged(add_bias, requests, [[1]] * 3, [1] * 3)

    expected = before.copy()
    expected[1, 3] += 5.0
    expected[1, 23] -= 100.0
    expected[2, 0] += 0.5
    np.testing.assert_allclose(after, expected, rtol=1e-6)


def test_stop_tokens_are_ruled_out_until_min_tokens_are_there():
    requests = [SamplingParams(min_tokens=3, stop_token_ids=(7,))] * 3 + [SamplingParams()]
    histories = [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2]]

    before, after = staged(
        ban_early_end, requests, histories, [2, 2, 2, 2], stop_ids=frozenset({4})
    )

    expected = before.copy()
    expected[0, [4, 7]] = -np.inf
    expected[1, [4, 7]] = -np.inf
    np.testing.assert_array_equal(after, expected)


def test_repetition_divides_or_multiplies_tokens_of_prompt_and_output():
    histories = [[1, 2, 2, 9], [5, 6], [3], [8, 8, 8, 8, 8, 8]]
    penalties = [1.5, 1.0, 0.5, 2.0]
    requests = [SamplingParams(repetition_penalty=penalty) for penalty in penalties]

    before, after = staged(penalise_repetition, requests, histories, [2, 1, 1, 6])

    expected = before.copy()
    for row, known in enumerate(histories):
        for token in set(known):
            score = before[row, token]
            expected[row, token] = score / penalties[row] if score > 0 else score * penalties[row]
    np.testing.assert_allclose(after, expected, rtol=1e-6)


def test_presence_and_frequency_count_the_output_alone():
    histories = [[1, 2, 2, 9, 2, 9], [5, 6, 6], [3, 4], [8, 8, 8, 8]]
    prompts = [3, 1, 2, 1]
    presences, frequencies = [0.5, 0.0, 1.0, -2.0], [0.25, 1.5, 1.0, 0.0]
    requests = [
        SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
        for presence, frequency in zip(presences, frequencies, strict=True)
    ]

    before, after = staged(penalise_presence, requests, histories, prompts)

    expected = before.copy()
    for row, known in enumerate(histories):
        output = known[prompts[row] :]
        for token in set(output):
            expected[row, token] -= presences[row] + frequencies[row] * output.count(token)
    np.testing.assert_allclose(after, expected, rtol=1e-5)


@pytest.mark.parametrize("penalty", [1e-9, 1e9, 1e-300, 1e300])
def test_extreme_repetition_penalties_stay_finite(penalty):
    logits = torch.tensor([[30.0, -30.0, 0.0] * 8])

    _, after = staged(
        penalise_repetition,
        [SamplingParams(repetition_penalty=penalty)],
        [[0, 1, 2]],
        [3],
        logits=logits,
    )

    assert np.isfinite(after).all()


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_a_stage_that_nobody_asked_for_changes_nothing(stage):
    before, after = staged(
        stage, [SamplingParams()] * 2, [[1, 2, 3]] * 2, [1] * 2, stop_ids=frozenset({2})
    )

    np.testing.assert_array_equal(after, before)


def test_bias_comes_before_the_repetition_penalty():
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, 5], logits[0, 6] = -1.0, 1.0
    # 5: (-1 + 3) / 4 = 0.5 if the bias is first, -1 * 4 + 3 = -1 otherwise; 6 has 0.
    params = SamplingParams(temperature=0.0, logit_bias={5: 3.0, 6: -1.0}, repetition_penalty=4.0)

    sampled = SamplerBench([params], vocab=VOCAB, histories=[[5]]).sample(logits)

    assert sampled.token_ids.tolist() == [5]
