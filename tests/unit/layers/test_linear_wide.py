"""Are rows of any dtype multiplied in float32 by a layer that was built widened, in every form its weight has?"""

from dataclasses import replace

import pytest
import torch

from tests.support.configs import CPU, GPU
from tests.support.steps import a_build
from tokamak.core.weight import DenseWeight
from tokamak.layers.linear import Linear


@pytest.mark.parametrize("facts", [CPU, replace(GPU, libraries=frozenset())], ids=["cpu", "gpu"])
@pytest.mark.parametrize("rows", [1, 40])
def test_narrow_rows_meet_a_wide_weight(facts, rows):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn((24, 64), generator=generator)
    x = torch.randn((rows, 64), generator=generator).bfloat16()
    linear = Linear(replace(a_build(torch.bfloat16), facts=facts).widened(), 64, (24,))
    linear.load([DenseWeight(weight)])

    found = linear.wide(x)

    assert found.dtype == torch.float32
    assert (found - x.float() @ weight.T).abs().max() < 1e-4
