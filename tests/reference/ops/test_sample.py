"""Do all backends weigh tokens as float64 does, each row by itself?"""

import numpy as np
import pytest
import torch

from tokamak.device.facts import cpu_facts
from tokamak.ops.load import load_backends
from tokamak.ops.sample import BLOCK_TOKENS, token_weights

load_backends()
FACTS = cpu_facts()
CALLS = {"reference": token_weights.reference} | {
    backend.name: backend.call for backend in token_weights.backends if backend.fits(FACTS)
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


def a_case(rows, vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocab, generator=generator) * 6
    scores[:, ::7] = float("-inf")
    scores[:, 1] = 3.0
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1e-4, 100.0])[torch.arange(rows) % 5]
    return scores, scores.amax(dim=1), temperatures.reciprocal()


@every_call
@pytest.mark.parametrize(("rows", "vocab"), [(1, 2), (5, 1023), (3, 1024), (5, 1031), (2, 49152)])
def test_weights_and_sums_are_those_of_float64(call, rows, vocab):
    scores, peaks, inverses = a_case(rows, vocab)

    weights, sums = call(scores, peaks, inverses)

    wide = (scores.double() - peaks.double()[:, None]) * inverses.double()[:, None]
    expected = np.zeros((rows, -(-vocab // BLOCK_TOKENS) * BLOCK_TOKENS))
    expected[:, :vocab] = wide.exp().numpy()
    np.testing.assert_allclose(weights.reshape(rows, -1).numpy(), expected, rtol=2e-5, atol=1e-12)
    blocks = expected.reshape(rows, -1, BLOCK_TOKENS).sum(axis=2)
    np.testing.assert_allclose(sums.numpy(), blocks, rtol=2e-5, atol=1e-9)
    assert (weights.reshape(rows, -1).amax(dim=1) == 1.0).all()


@every_call
@pytest.mark.parametrize("vocab", [77, 5000, 49152])
def test_a_row_weighs_the_same_alone_and_in_a_batch(call, vocab):
    scores, peaks, inverses = a_case(9, vocab)

    weights, sums = call(scores, peaks, inverses)

    for row in range(9):
        cut = slice(row, row + 1)
        alone = call(scores[cut].clone(), peaks[cut].clone(), inverses[cut].clone())
        assert torch.equal(weights[cut], alone[0])
        assert torch.equal(sums[cut], alone[1])


@every_call
def test_scores_of_any_size_give_finite_weights(call):
    scores = torch.tensor([[2e31, -2e31, 0.0, float("-inf")]])

    weights, sums = call(scores, scores.amax(dim=1), torch.tensor([1e5]))

    assert weights[0, 0, :4].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert sums.tolist() == [[1.0]]
