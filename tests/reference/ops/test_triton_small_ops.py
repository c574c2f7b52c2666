"""Do the Triton backends of the small ops compute what the reference does? Kernels are interpreted on the CPU.

Attention, linear layers of plain numbers and experts have files of their own.
"""

import functools
import importlib.util

import pytest

from tests.support.interpreted import cases_at, interpreted_gaps

CASES = {
    "norm": {
        "rms_norm": "tokamak.ops.norm.cases:rms_norm_cases",
        "add_rms_norm": "tokamak.ops.norm.cases:add_rms_norm_cases",
        "add_residual": "tokamak.ops.norm.cases:add_residual_cases",
    },
    "sample": {
        "token_weights": "tokamak.ops.sample.cases:token_weights_cases",
        "argmax_rows": "tokamak.ops.sample.cases:argmax_rows_cases",
        "draw_rows": "tokamak.ops.sample.cases:draw_rows_cases",
    },
    "step_prep": {
        "fill_step": "tests.support.op_cases:filled_steps",
        "fill_indptrs": "tokamak.ops.step_prep.cases:fill_indptrs_cases",
        "fill_unit_tiles": "tokamak.ops.step_prep.cases:fill_unit_tiles_cases",
    },
    "walk_plan": {"fill_walk_plan": "tests.support.op_cases:walked_steps"},
    "quantize": {
        "quantize_rows": "tokamak.ops.quantize.rows_cases:quantize_rows_cases",
        "fake_fp8": "tokamak.ops.quantize.cases:fake_fp8_cases",
        "fake_mxfp4": "tokamak.ops.quantize.cases:fake_mxfp4_cases",
        "fake_nvfp4": "tokamak.ops.quantize.cases:fake_nvfp4_cases",
    },
    "activation": {
        "silu_mul": "tokamak.ops.activation.cases:silu_mul_cases",
        "silu_mul_limited": "tokamak.ops.activation.limited_cases:silu_mul_limited_cases",
    },
    "compress": {
        "write_rows": "tokamak.ops.compress.cases:write_rows_cases",
        "fold_groups": "tokamak.ops.compress.cases:fold_groups_cases",
    },
    "rotate_write": {"rotate_write": "tokamak.ops.rotate_write.cases:rotate_write_cases"},
    "records": {"write_records": "tokamak.ops.records.cases:write_records_cases"},
    "grouped_linear": {"grouped_linear": "tokamak.ops.grouped_linear.cases:grouped_linear_cases"},
    "quant_linear": {"scaled_linear": "tokamak.ops.quant_linear.cases:scaled_linear_cases"},
    "moe_route": {
        "moe_route_rooted": "tokamak.ops.moe_route.rooted_cases:moe_route_rooted_cases",
        "moe_weigh_rooted": "tokamak.ops.moe_route.rooted_cases:moe_weigh_rooted_cases",
    },
    "residual_mix": {
        name: f"tokamak.ops.residual_mix.cases:{name}_cases"
        for name in (
            "mix_coefficients",
            "head_coefficients",
            "collapse_streams",
            "collapse_norm",
            "expand_streams",
        )
    },
    "engram": {
        name: f"tokamak.ops.engram.cases:{name}_cases"
        for name in ("engram_rows", "engram_values", "engram_gate")
    },
    "embedding": {"embed": "tokamak.ops.embedding.cases:embed_cases"},
    "rope": {
        "rotate_and_cache": "tokamak.ops.rope.cases:rotate_and_cache_cases",
        "rotate_pairs": "tokamak.ops.rope.pairs_cases:rotate_pairs_cases",
    },
}
LIMITS = {"engram": {"tokamak.ops.engram.triton:DEVICE_PROGRAMS": 1}}
"""By package: one program reads all rows of a table, as few do for one in the host's memory."""
pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]


@functools.cache
def package_gaps(package: str) -> dict[str, dict[str, float]]:
    """The differences of one package's ops, computed when its first case runs."""
    return interpreted_gaps(CASES[package], limits=LIMITS.get(package))


@pytest.mark.parametrize(
    ("package", "op_name", "case"),
    [
        pytest.param(package, name, case, id=f"{name}: {case}")
        for package, ops in CASES.items()
        for name, place in ops.items()
        for case in cases_at(place)
    ],
)
def test_a_backend_agrees_with_the_reference(package, op_name, case):
    assert package_gaps(package)[op_name][str(case)] <= case.tolerance
