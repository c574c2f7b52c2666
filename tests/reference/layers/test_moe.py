"""Do stacked experts hold the tensors of a checkpoint in their places, and do rows go through those chosen?"""

from __future__ import annotations

import pytest
import torch

from tests.reference.ops import formulas
from tests.support.steps import a_build
from tokamak.core.weight import DenseWeight
from tokamak.layers.moe import ExpertsMLP, StackedExperts
from tokamak.layers.norm import RMSNorm

EXPERTS, WIDTH, INNER = 5, 16, 12


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def an_mlp(**changes):
    sizes = {"width": WIDTH, "inner_width": INNER, "experts": EXPERTS, "chosen": 2}
    return ExpertsMLP(a_build(), **{**sizes, "renormalise": True, **changes})


def test_the_parts_of_an_expert_are_stacked_by_rows_and_experts_lie_in_order():
    stacked = StackedExperts(a_build(), 3, 8, (4, 2))
    parts = [numbers(rows, 8, seed=at) for at, rows in enumerate([4, 2] * 3)]

    stacked.load([DenseWeight(part) for part in parts])

    assert stacked.part_shapes == ((4, 8), (2, 8)) * 3
    assert stacked.values.shape == (3, 6, 8)
    for expert in range(3):
        assert torch.equal(stacked.values[expert], torch.cat(parts[2 * expert : 2 * expert + 2]))


def test_experts_take_the_models_dtype():
    stacked = StackedExperts(a_build(torch.bfloat16), 2, 8, (4,))
    parts = [numbers(4, 8, seed=at) for at in range(2)]

    stacked.load([DenseWeight(part) for part in parts])

    assert torch.equal(stacked.values, torch.stack(parts).bfloat16())


def test_experts_without_weights_are_not_computed_with():
    with pytest.raises(AssertionError, match="before their weights were loaded"):
        an_mlp().gate_up.values  # noqa: B018


def test_a_part_too_few_is_not_loaded():
    stacked = StackedExperts(a_build(), 2, 8, (4,))

    with pytest.raises(AssertionError, match="1 parts for experts of 2"):
        stacked.load([DenseWeight(numbers(4, 8))])


def test_random_experts_differ_keep_the_size_of_rows_and_repeat_with_their_seed():
    def filled(seed):
        stacked = StackedExperts(a_build(), 16, 64, (48, 48))
        stacked.load(stacked.draw(torch.Generator().manual_seed(seed)))
        return stacked.values

    values = filled(1)

    assert torch.equal(values, filled(1))
    assert not torch.equal(values, filled(2))
    assert len({tuple(part[0].tolist()) for part in values.view(32, 48, 64)}) == 32
    out = torch.einsum("w,erw->er", numbers(64), values)
    assert 0.8 < out.std() / numbers(64).std() < 1.25


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("rows", [1, 30])
def test_rows_go_through_the_experts_their_scores_choose(rows, renormalise):
    mlp, x = an_mlp(renormalise=renormalise), numbers(rows, WIDTH, seed=9)
    router = numbers(EXPERTS, WIDTH, seed=1)
    gate_up = numbers(EXPERTS, 2 * INNER, WIDTH, seed=2)
    down = numbers(EXPERTS, WIDTH, INNER, seed=3)
    mlp.router.load([DenseWeight(router)])
    mlp.gate_up.load([DenseWeight(part) for part in gate_up.view(-1, INNER, WIDTH)])
    mlp.down.load([DenseWeight(part) for part in down])

    norm = RMSNorm(a_build(), WIDTH, 0.0)
    norm.weight.load([DenseWeight(torch.ones(WIDTH))])
    x /= x.pow(2).mean(-1, keepdim=True).sqrt()

    found = mlp(None, x, norm)

    ids, weights = formulas.moe_route(x.double() @ router.double().T, 2, renormalise)
    chosen, shares = torch.from_numpy(ids), torch.from_numpy(weights)
    expected = torch.from_numpy(formulas.moe_experts(x, chosen, shares, gate_up, down))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
