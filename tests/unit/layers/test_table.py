"""Do tables give the rows they are asked for, keep the bits they were stored in, and lie where they are to lie?"""

from dataclasses import replace

import pytest
import torch

from tests.support.configs import GPU
from tests.support.steps import a_build
from tokamak.core.weight import DenseWeight, ScaledWeight
from tokamak.errors import NoBackendError
from tokamak.layers import table as tables
from tokamak.layers.table import Table
from tokamak.quant.weights import fp8_weight

ROWS = torch.tensor([4, 0, 4, 29])


def numbers():
    return torch.randn(30, 64, generator=torch.Generator().manual_seed(3))


def a_table(dtype=torch.float32, rows=30, *, host=True):
    return Table(replace(a_build(dtype), host_tables=host), rows, 64)


def read(table, rows=ROWS, dtype=torch.float32):
    out = torch.empty((len(rows), 64), dtype=dtype)
    table.read(rows, out)
    return out


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(DenseWeight(numbers()), id="plain"),
        pytest.param(DenseWeight(numbers().bfloat16()), id="plain in 16 bits"),
        pytest.param(fp8_weight(numbers(), (1, 32)), id="a power of two for 32 columns"),
        pytest.param(fp8_weight(numbers(), (1, 64), powers_of_two=False), id="a scale a row"),
        pytest.param(fp8_weight(numbers(), (32, 32)), id="blocks of several rows"),
    ],
)
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_those_of_the_stored_numbers(weight, dtype, host):
    table = a_table(dtype, host=host)
    table.load([weight])

    assert torch.equal(read(table, dtype=dtype), weight.dense(dtype)[ROWS])


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_a_table_on_the_host_is_read_where_it_lies_and_another_is_copied(host):
    stored = fp8_weight(numbers(), (1, 32))
    assert isinstance(stored, ScaledWeight)
    table = a_table(host=host)
    table.load([stored])

    stored.codes.view(torch.uint8)[4] = 0

    assert (read(table)[::2] == 0).all() == host


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("quantise", [False, True], ids=["plain", "in 8 bits"])
def test_a_large_random_table_is_a_drawn_part_of_it_again_and_again(monkeypatch, host, quantise):
    monkeypatch.setattr(tables, "DRAWN_ROWS", 8)
    table = a_table(host=host)
    (drawn,) = table.draw(torch.Generator().manual_seed(0))
    if quantise:
        drawn = fp8_weight(drawn.dense(torch.float32), (1, 32))
    table.load([drawn])

    found = read(table, torch.arange(30))

    assert drawn.shape == (8, 64)
    assert found.std() == pytest.approx(1.0, abs=0.2)
    assert torch.equal(found, drawn.dense(torch.float32).repeat(4, 1)[:30])


def test_a_gpu_without_kernels_that_read_the_host_is_refused():
    """A device with the reference alone would move rows through the host, and wait."""
    build = replace(
        a_build(), facts=GPU, device=torch.device("cuda"), host_tables=True,
        prefer={"engram_values": "reference"},
    )  # fmt: skip

    with pytest.raises(NoBackendError, match="engram_tables is host, and op engram_values would"):
        Table(build, 30, 64)
