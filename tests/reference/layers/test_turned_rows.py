"""Does one op cache of a row what norm, rotation, rounding and writing cache of it in turn?"""

from types import SimpleNamespace

import pytest
import torch

from tests.support.steps import a_build
from tokamak.layers.attention.compressed import CacheRows, Rotation, TurnedRows
from tokamak.layers.norm import RMSNorm

WIDTH, TOKENS, BLOCK_ROWS = 64, 7, 4


def cached(prefer, *, ratio, rounded, normed):
    """What a cache of nothing holds after rows are written to it."""
    build = a_build(torch.bfloat16, prefer=prefer)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn((TOKENS, WIDTH), generator=generator).to(build.dtype)
    norm = RMSNorm(build, WIDTH, 1e-6)
    norm.weight.values[:] = torch.rand(WIDTH, generator=generator) + 0.5
    kept = CacheRows(build, "kept", ratio)
    kept.bind(torch.zeros((6, 1, BLOCK_ROWS, WIDTH), dtype=build.dtype))
    rotation = Rotation(build, torch.rand((64, 16), generator=generator))
    positions = torch.arange(20, 20 + TOKENS, dtype=torch.int32)
    slots = BLOCK_ROWS * ratio + positions.long() - 20
    slots[2] = -1
    step = SimpleNamespace(positions=positions, rows={"kept": SimpleNamespace(write_slots=slots)})

    turned = TurnedRows(build, kept, rotation, norm=norm if normed else None, rounded=rounded)
    turned.write(rows, step)

    return kept.cache, "rotate_write" in build.choices


@pytest.mark.parametrize("rounded", ["", "fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(("ratio", "normed"), [(1, True), (2, False)])
def test_one_op_caches_what_its_parts_do(ratio, normed, rounded):
    given = {"ratio": ratio, "normed": normed, "rounded": rounded}

    parts, joined_parts = cached({}, **given)
    joined, is_joined = cached({"rotate_write": "reference"}, **given)

    assert (joined_parts, is_joined) == (False, True)
    assert parts.any()
    assert torch.equal(joined, parts)
