"""Do the ops of DeepSeek V4 and V4.1 compute what their formulas say, in float64 and row by row?"""

from __future__ import annotations

import pytest
import torch

from tests.reference.ops import compressed_formulas
from tests.support.op_cases import gap, ops_with_cases
from tokamak.ops.engram import engram_rows
from tokamak.ops.residual_mix import mix_coefficients
from tokamak.ops.whole_rows import ROWS, whole_rows

NAMES = [name for name, value in vars(compressed_formulas).items() if hasattr(value, "__code__")]
OPS = [(op, cases) for op, cases in ops_with_cases() if op.name in NAMES]

every_case = pytest.mark.parametrize(
    ("op", "case"),
    [pytest.param(op, case, id=f"{op.name}: {case}") for op, cases in OPS for case in cases],
)


def test_every_op_has_a_formula():
    assert {op.name for op, _ in OPS} == {
        "collapse_streams", "engram_gate", "engram_rows", "expand_streams", "fold_groups", "head_coefficients",
        "mix_coefficients", "moe_experts_limited", "moe_route_rooted", "moe_weigh_rooted", "rotate_pairs",
        "select_entries", "silu_mul_limited", "sparse_attention", "write_records", "write_rows",
    }  # fmt: skip


@every_case
def test_the_reference_agrees_with_the_formula(op, case):
    result = getattr(compressed_formulas, op.name)(*case.make())
    formula = result if isinstance(result, tuple) else (result,)

    found = case.outcome(op.reference)

    assert gap(found, [torch.from_numpy(array) for array in formula]) <= case.tolerance


def test_coefficients_of_published_numbers():
    # Four streams of one number each, so that products are what `fn` says.
    wanted = torch.tensor([0.4 * (at % 7 - 3) for at in range(24)])
    fn = (wanted / 4)[:, None].expand(24, 4).contiguous()

    read, write, mix = mix_coefficients(
        torch.ones(1, 4, 1), fn, torch.zeros(24), torch.ones(3), 1e-20, 1e-6, 20
    )

    torch.testing.assert_close(read[0], torch.tensor([0.2314762, 0.3100265, 0.4013133, 0.5000010]))
    torch.testing.assert_close(write[0], torch.tensor([1.1973753, 1.3799490, 1.5370496, 0.4629504]))
    torch.testing.assert_close(
        mix[0],
        torch.tensor(
            [
                [0.0776675, 0.1708319, 0.3757497, 0.3757500],
                [0.2639959, 0.5806676, 0.0776679, 0.0776676],
                [0.0776675, 0.1708319, 0.3757497, 0.3757500],
                [0.5806681, 0.0776677, 0.1708317, 0.1708315],
            ]
        ),
    )


def test_hashes_of_published_numbers():
    tokens = torch.tensor(
        [[(7 * at * at + 3 * at + 11) % 1024 for at in range(5)]], dtype=torch.int32
    )
    ids = (torch.arange(1024) + 37) % 700
    multipliers = torch.tensor(
        [10848039516306619, 685132859769461, 5090451213527091, 10473647490610037]
    )
    primes = torch.tensor([[997, 1009], [1013, 1019], [1021, 1031]])
    out = torch.zeros((5, 6), dtype=torch.int64)

    engram_rows(
        tokens,
        torch.tensor([0], dtype=torch.int32),
        torch.arange(5, dtype=torch.int32),
        torch.tensor([0, 5], dtype=torch.int32),
        0,
        ids,
        39,
        multipliers,
        primes,
        out,
    )

    assert out[0].tolist() == [294, 1118, 2713, 3799, 4138, 5143]
    assert out[4].tolist() == [716, 1008, 2114, 3706, 4659, 5672]


@pytest.mark.parametrize("rows", [1, 5, 63, 64, 65])
def test_rows_are_the_same_numbers_among_any_others(rows):
    generator = torch.Generator().manual_seed(1)
    streams = torch.randn((70, 4, 64), generator=generator)
    weights = [torch.randn(shape, generator=generator) for shape in ((24, 256), (24,), (3,))]

    whole = mix_coefficients(streams, *weights, 1e-20, 1e-6, 20)
    part = mix_coefficients(streams[:rows], *weights, 1e-20, 1e-6, 20)

    assert all(torch.equal(a[:rows], b) for a, b in zip(whole, part, strict=True))
    assert whole_rows(streams).shape[0] == 2 * ROWS
