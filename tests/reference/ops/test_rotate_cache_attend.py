"""Is rotating, caching and attending at once what the two papers say, and may its kernel look ahead?"""

import pytest
import torch

from tests.reference.ops import formulas
from tests.support.op_cases import gap
from tokamak.ops.embedding import embed
from tokamak.ops.load import load_backends
from tokamak.ops.rotate_cache_attend import rotate_cache_attend
from tokamak.ops.rotate_cache_attend.cases import rotate_cache_attend_cases

load_backends()
OUT = 15


def formula(*arguments):
    """Caches and mixed values, in float64."""
    queries, keys, values = (
        torch.from_numpy(each) for each in formulas.rotate_and_cache(*arguments[:9])
    )
    mixed = formulas.paged_attention(queries, keys, values, *arguments[9:])
    return keys, values, torch.from_numpy(mixed)


@pytest.mark.parametrize("case", rotate_cache_attend_cases, ids=str)
def test_the_reference_agrees_with_the_formulas_in_float64(case):
    expected = formula(*case.make())

    found = case.outcome(rotate_cache_attend.reference)

    assert gap(found, expected) <= case.tolerance


@pytest.mark.parametrize("case", rotate_cache_attend_cases, ids=str)
def test_every_real_row_is_written(case):
    *_, out = case.outcome(rotate_cache_attend.reference)

    assert out.isfinite().all()


def test_embeddings_are_looked_up_by_a_kernel_that_begins_after_the_tables_are_filled():
    """Attention reads lengths and tables before it waits, so some kernel behind the fill must overtake nobody."""
    assert {backend.name for backend in embed.backends} <= {"llvm", "triton"}
