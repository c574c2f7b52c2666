"""Do tables give the rows they are asked for, and keep the bits they were stored in?"""

import pytest
import torch

from tests.support.steps import a_build
from tokamak.core.weight import DenseWeight, ScaledWeight
from tokamak.layers.table import Table
from tokamak.quant.weights import fp8_weight

ROWS = torch.tensor([4, 0, 4, 29])


def numbers():
    return torch.randn(30, 64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(DenseWeight(numbers()), id="plain"),
        pytest.param(fp8_weight(numbers(), (1, 32)), id="a power of two for 32 columns"),
        pytest.param(fp8_weight(numbers(), (1, 64), powers_of_two=False), id="a scale a row"),
        pytest.param(fp8_weight(numbers(), (32, 32)), id="blocks of several rows"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_those_of_the_stored_numbers(weight, dtype):
    table = Table(a_build(dtype), 30, 64)
    table.load([weight])

    assert torch.equal(table(ROWS), weight.dense(dtype)[ROWS])


def test_a_table_in_8_bits_is_read_where_it_lies():
    stored = fp8_weight(numbers(), (1, 32))
    assert isinstance(stored, ScaledWeight)
    table = Table(a_build(), 30, 64)
    table.load([stored])

    stored.codes.view(torch.uint8)[4] = 0

    assert (table(ROWS)[::2] == 0).all()


def test_a_table_draws_numbers_for_itself():
    table = Table(a_build(), 30, 64)
    table.load(table.draw(torch.Generator().manual_seed(0)))

    assert table(ROWS).std() == pytest.approx(1.0, abs=0.2)
