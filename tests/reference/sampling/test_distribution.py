"""Do drawn tokens follow the distribution the parameters describe, worked out in float64?"""

import numpy as np
import pytest
import torch

from tests.support.sampling import SamplerBench
from tokamak.core.request import SamplingParams
from tokamak.device.facts import cpu_facts
from tokamak.ops.load import load_backends
from tokamak.ops.sample import token_weights
from tokamak.sampling.draw import Draw, draw

load_backends()
WEIGHS = {"reference": token_weights.reference} | {
    backend.name: backend.call for backend in token_weights.backends if backend.fits(cpu_facts())
}


def exact(logits, params):
    """The distribution over the vocabulary, by sorting: [vocab] float64."""
    scores = logits.astype(np.float64) / params.temperature
    likely = np.exp(scores - scores.max())
    likely /= likely.sum()
    order = np.lexsort((np.arange(likely.size), -likely))
    kept = likely[order]
    if 0 < params.top_k < kept.size:
        kept[params.top_k :] = 0.0
        kept /= kept.sum()
    if params.top_p < 1.0:
        kept[np.flatnonzero(np.cumsum(kept) >= params.top_p)[0] + 1 :] = 0.0
    if params.min_p > 0.0:
        kept[kept < params.min_p * kept[0]] = 0.0
    out = np.zeros_like(kept)
    out[order] = kept / kept.sum()
    return out


def chi_square(counts, expected):
    """The statistic over tokens expected at least five times (the rest together), and its cells."""
    common = expected >= 5
    cells_seen = np.append(counts[common], counts[~common].sum())
    cells_expected = np.append(expected[common], expected[~common].sum())
    real = cells_expected > 0
    difference = (cells_seen - cells_expected)[real]
    return (difference**2 / cells_expected[real]).sum(), int(real.sum())


def named(value):
    """A test id: the parameters that differ from their defaults."""
    if not isinstance(value, SamplingParams):
        return str(value)
    names = ("temperature", "top_k", "top_p", "min_p")
    asked = {name: getattr(value, name) for name in names}
    plain = SamplingParams()
    return ",".join(f"{k}={v}" for k, v in asked.items() if v != getattr(plain, k)) or "plain"


SMALL = 60
CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.4),
    SamplingParams(temperature=3.0),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(top_p=0.97, temperature=2.0),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=20, top_p=0.7, min_p=0.2, temperature=1.5),
]


@pytest.mark.parametrize("params", CASES, ids=named)
def test_draws_follow_the_exact_distribution(params):
    seeds, steps = 2000, 8
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1, SMALL, generator=generator) * 2
    requests = [
        SamplingParams(
            seed=seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        for seed in range(seeds)
    ]
    bench = SamplerBench(requests, vocab=SMALL, max_len=16)

    drawn = np.concatenate(
        [bench.step(logits.expand(seeds, -1)).token_ids.numpy() for _ in range(steps)]
    )

    probabilities = exact(logits[0].numpy(), params)
    counts = np.bincount(drawn, minlength=SMALL)
    statistic, cells = chi_square(counts, probabilities * drawn.size)
    assert not counts[probabilities == 0.0].any()
    assert statistic < cells + 4.5 * np.sqrt(2 * cells) + 5  # far beyond p = 1e-4


def a_draw(params, uniforms, vocab):
    rows = uniforms.size
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    return Draw(
        temperature=np.full(rows, params.temperature),
        top_k=np.full(rows, top_k, np.int64),
        top_p=np.full(rows, params.top_p),
        min_p=np.full(rows, params.min_p),
        uniforms=uniforms,
    )


LARGE = [
    (scale, SamplingParams(**settings))
    for scale in (0.5, 2.0, 6.0)
    for settings in (
        {},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.9999, "temperature": 1.3},
        {"min_p": 0.02},
        {"min_p": 1e-7},
        {"top_k": 50},
        {"top_k": 300},
        {"top_k": 5000, "top_p": 0.9},
        {"top_k": 100, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
    )
]


@pytest.mark.parametrize(("scale", "params"), LARGE, ids=named)
@pytest.mark.parametrize("vocab", [300, 9000])
@pytest.mark.parametrize("weigh", WEIGHS.values(), ids=WEIGHS.keys())
def test_draws_invert_the_exact_distribution_wherever_the_cut_falls(weigh, vocab, scale, params):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=vocab) * scale).astype(np.float32)
    uniforms = rng.uniform(size=24)
    scores = torch.from_numpy(logits).expand(24, -1).contiguous()

    drawn = draw(scores, scores.amax(dim=1), a_draw(params, uniforms, vocab), weigh).numpy()

    probabilities = exact(logits, params)
    whole = params.top_p == 1.0 and params.min_p == 0.0 and not 0 < params.top_k < vocab
    order = np.arange(vocab) if whole else np.lexsort((np.arange(vocab), -logits))
    ends = np.cumsum(probabilities[order])
    places = np.argsort(order)[drawn]
    assert (probabilities[drawn] > 0.0).all()
    assert (ends[places] >= uniforms - 1e-4).all()
    assert (ends[places] - probabilities[drawn] <= uniforms + 1e-4).all()


def test_equal_scores_at_the_cut_are_kept_by_id():
    logits = torch.zeros(400, 3000)
    logits[:, 2000:] = 1.0
    uniforms = (np.arange(400) + 0.5) / 400

    drawn = draw(logits, logits.amax(dim=1), a_draw(SamplingParams(top_k=40), uniforms, 3000))

    assert sorted(set(drawn.tolist())) == list(range(2000, 2040))
    assert np.bincount(drawn.numpy() - 2000).tolist() == [10] * 40


def test_a_row_whose_scores_are_almost_all_ruled_out_draws_from_the_rest():
    logits = torch.full((1, 5000), float("-inf"))
    logits[0, [17, 4321]] = torch.tensor([1.0, 1.0])
    settings = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=40)]

    drawn = {
        int(draw(logits, logits.amax(dim=1), a_draw(params, np.array([uniform]), 5000)))
        for params in settings
        for uniform in (0.0, 0.3, 0.7, 1 - 2.0**-53)
    }

    assert drawn == {17, 4321}
