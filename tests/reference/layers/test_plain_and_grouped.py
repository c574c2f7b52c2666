"""Do parameters that stay plain keep their numbers, and products by groups see their own group alone?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.configs import CPU, GPU
from tests.support.steps import a_build
from tokamak.core.weight import DenseWeight
from tokamak.layers.grouped import GroupedLinear
from tokamak.layers.plain import Plain
from tokamak.layers.table import Table
from tokamak.ops.load import load_backends

load_backends()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_a_plain_parameter_has_a_dtype_of_its_own(dtype):
    parameter = Plain(a_build(torch.bfloat16), (3, 2), dtype=dtype)
    numbers = torch.tensor([[1, 2], [3, 4], [5, 6]])

    parameter.load([DenseWeight(numbers)])

    assert parameter.values.dtype == dtype
    assert parameter.values.tolist() == numbers.tolist()


def test_a_plain_parameter_is_not_read_before_it_is_loaded():
    with pytest.raises(AssertionError, match="before it was loaded"):
        _ = Plain(a_build(), (3,)).values


@pytest.mark.parametrize("kind", [Plain, lambda build, shape: Table(build, *shape)])
def test_a_table_is_no_matrix_that_rows_go_through(kind):
    assert kind(a_build(), (384_006_168, 256)).row_shapes == ()


@pytest.mark.parametrize("facts", [CPU, GPU], ids=["each in its own form", "all at once"])
def test_each_group_is_multiplied_with_its_own_rows(facts):
    layer = GroupedLinear(replace(a_build(), facts=facts), 2, 8, 4)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((8, 8), generator=generator)
    # More rows than kernels take: a library multiplies them on any device.
    x = torch.randn((500, 2, 8), generator=generator)

    layer.load([DenseWeight(weight)])

    expected = torch.cat([x[:, 0] @ weight[:4].T, x[:, 1] @ weight[4:].T], dim=1)
    torch.testing.assert_close(layer(x), expected)
