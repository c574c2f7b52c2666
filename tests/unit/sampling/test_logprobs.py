"""Are log-probabilities the model's own, in order, with the right rank?"""

import numpy as np
import pytest
import torch

from tests.support.sampling import SamplerBench
from tokamak.core.request import SamplingParams
from tokamak.sampling.logprobs import ROWS_AT_ONCE, score

VOCAB = 400


def random_logits(rows):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def reference(logits):
    wide = logits.double().numpy()
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("top", [0, 1, 20, VOCAB + 5])
def test_the_chosen_token_comes_first_then_the_likeliest_in_order(top):
    logits = random_logits(3)
    chosen = torch.tensor([7, 0, 399], dtype=torch.int32)

    entries = score(logits, chosen, [top] * 3)

    for row, entry in enumerate(entries):
        expected = reference(logits[row])
        order = np.argsort(-expected, kind="stable")[:top]
        assert entry.token_ids.tolist() == [int(chosen[row]), *order]
        np.testing.assert_allclose(entry.logprobs, expected[entry.token_ids], atol=1e-5)
        assert entry.rank == int((expected >= expected[chosen[row]]).sum())
        assert entry.token_ids.dtype == np.int32
        assert entry.logprobs.dtype == np.float32


def test_equal_alternatives_are_listed_by_id():
    logits = torch.zeros(1, VOCAB)
    logits[0, [300, 20, 100]] = 1.0

    entry = score(logits, torch.tensor([20]), [5])[0]

    assert entry.token_ids.tolist() == [20, 20, 100, 300, 0, 1]
    assert entry.rank == 3


def test_a_greedy_token_is_its_own_first_alternative():
    logits = random_logits(4).round()
    params = SamplingParams(temperature=0.0, logprobs=3)

    sampled = SamplerBench([params] * 4, vocab=VOCAB).sample(logits)

    for token, entry in zip(sampled.token_ids.tolist(), sampled.logprobs, strict=True):
        assert entry is not None
        assert entry.token_ids[:2].tolist() == [token, token]


def test_bias_penalties_and_temperature_leave_logprobs_alone():
    logits = random_logits(1)
    params = SamplingParams(
        logit_bias={9: 100.0}, repetition_penalty=2.0, temperature=0.5, logprobs=2, seed=1
    )

    entry = SamplerBench([params], vocab=VOCAB, histories=[[1, 2]]).sample(logits).logprobs[0]

    assert entry is not None
    assert entry.token_ids[0] == 9
    np.testing.assert_allclose(entry.logprobs[0], reference(logits[0])[9], atol=1e-5)


def test_rows_get_as_many_alternatives_as_each_asked_for():
    requests = [SamplingParams(temperature=0.0, logprobs=asked) for asked in (None, 0, 4, None, 2)]

    entries = SamplerBench(requests, vocab=VOCAB).sample(random_logits(5)).logprobs

    sizes = [None if entry is None else entry.token_ids.size for entry in entries]
    assert sizes == [None, 1, 5, None, 3]


def test_prompt_positions_are_scored_one_target_each():
    rows = ROWS_AT_ONCE * 2 + 3
    logits = random_logits(rows)
    targets = torch.arange(rows, dtype=torch.int32) % VOCAB
    sampler = SamplerBench([SamplingParams()], vocab=VOCAB).sampler

    entries = sampler.prompt_logprobs(logits, targets, 2)

    expected = reference(logits)
    assert [entry.token_ids[0] for entry in entries] == targets.tolist()
    for row, entry in enumerate(entries):
        np.testing.assert_allclose(entry.logprobs[0], expected[row, targets[row]], atol=1e-5)
