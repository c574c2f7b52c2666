"""Does every backend of every op compute what the reference says, and the reference what the papers say?"""

import pytest
import torch

from tests.reference.ops import formulas
from tokamak.device.facts import cpu_facts
from tokamak.ops.activation import silu_mul
from tokamak.ops.activation.cases import silu_mul_cases
from tokamak.ops.case import difference
from tokamak.ops.embedding import embed
from tokamak.ops.embedding.cases import embed_cases
from tokamak.ops.load import load_backends
from tokamak.ops.norm import add_residual, add_rms_norm, rms_norm
from tokamak.ops.norm.cases import add_residual_cases, add_rms_norm_cases, rms_norm_cases
from tokamak.ops.paged_attention import paged_attention
from tokamak.ops.paged_attention.cases import paged_attention_cases
from tokamak.ops.rope import rotate_and_cache
from tokamak.ops.rope.cases import rotate_and_cache_cases

load_backends()

OPS = (
    (rms_norm, rms_norm_cases),
    (add_rms_norm, add_rms_norm_cases),
    (add_residual, add_residual_cases),
    (embed, embed_cases),
    (silu_mul, silu_mul_cases),
    (rotate_and_cache, rotate_and_cache_cases),
    (paged_attention, paged_attention_cases),
)


def add_rms_norm_formula(x, residual, weight, eps):
    total = (residual + x).to(x.dtype)
    return formulas.rms_norm(total, weight, eps), formulas.wide(total)


FORMULAS = {
    "rms_norm": formulas.rms_norm,
    "add_rms_norm": add_rms_norm_formula,
    "add_residual": formulas.add_residual,
    "embed": formulas.embed,
    "silu_mul": formulas.silu_mul,
    "rotate_and_cache": formulas.rotate_and_cache,
    "paged_attention": formulas.paged_attention,
}

every_case = pytest.mark.parametrize(
    ("op", "case"),
    [pytest.param(op, case, id=f"{op.name}: {case}") for op, cases in OPS for case in cases],
)


@pytest.mark.parametrize("threads", [1, 2])
@every_case
def test_backends_agree_with_the_reference(op, case, threads):
    expected = case.outcome(op.reference)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    found = {b.name: case.outcome(b.call) for b in op.backends if b.fits(cpu_facts())}

    torch.set_num_threads(before)
    gaps = {name: _difference(outcome, expected) for name, outcome in found.items()}
    assert all(gap <= case.tolerance for gap in gaps.values()), gaps


@every_case
def test_the_reference_agrees_with_the_formula_in_float64(op, case):
    result = FORMULAS[op.name](*case.make())
    formula = result if isinstance(result, tuple) else (result,)
    expected = [torch.from_numpy(array) for array in formula]

    found = case.outcome(op.reference)

    assert _difference(found, expected) <= case.tolerance


@pytest.mark.parametrize("op", [op for op, _ in OPS], ids=lambda op: op.name)
def test_this_machine_runs_more_than_the_reference_where_kernels_can_be_compiled(op):
    names = {backend.name for backend in op.backends if backend.fits(cpu_facts())}

    assert ("llvm" in names) == _has_kernels()


def _has_kernels():
    facts = cpu_facts()
    return facts.has("llvmlite") and bool({"avx2", "avx512f", "asimd"} & facts.features)


def _difference(found, expected):
    """Caches hold numbers that nobody may read; they are NaN on both sides."""
    pairs = [
        (torch.where(b.isnan() & a.isnan(), 0.0, a.double()), torch.nan_to_num(b.double()))
        for a, b in zip(found, expected, strict=True)
    ]
    return difference([a for a, _ in pairs], [b for _, b in pairs])
