"""Do the small Triton kernels compile for both vendors, for the arguments that the ops' cases give them?

Compiling takes no device: launches are replaced by it, and what would be launched is kept.
"""

import importlib.util

import pytest
import torch

from tests.support.op_cases import ops_with_cases
from tokamak.ops.load import load_backends

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
]
VENDORS = ("nvidia", "amd")
CODE = {"nvidia": "ptx", "amd": "amdgcn"}
NAMES = (
    "add_residual", "add_rms_norm", "argmax_rows", "collapse_norm", "collapse_streams", "embed", "engram_gate", "engram_rows", "engram_values", "expand_streams", "fake_fp8", "fake_mxfp4", "fake_nvfp4", "fill_indptrs", "fill_step", "fill_unit_tiles",
    "head_coefficients", "mix_coefficients", "moe_route_rooted", "moe_weigh_rooted", "rms_norm", "rotate_and_cache", "rotate_pairs", "rotate_write", "silu_mul", "silu_mul_limited", "token_weights",
    "fold_groups", "grouped_linear", "select_entries", "sparse_attention", "write_records", "write_rows", "fill_walk_plan",
)  # fmt: skip

NVIDIA_NAMES = ("quantize_rows", "scaled_experts", "scaled_linear")
"""Of numbers that gfx942 does not have."""
STEPS = [
    *(pytest.param(vendor, name, id=f"{name}-{vendor}") for vendor in VENDORS for name in NAMES),
    *(pytest.param("nvidia", name, id=f"{name}-nvidia") for name in NVIDIA_NAMES),
]

load_backends()
CASES = {op.name: cases for op, cases in ops_with_cases()}


@pytest.mark.parametrize(("vendor", "op_name"), STEPS)
def test_kernels_compile_for_all_cases(compile_for, vendor, op_name):
    kernels = compile_for(vendor, op_name, [case.make() for case in CASES[op_name]])

    assert kernels
    assert all(kernel.asm[CODE[vendor]] for kernel in kernels.values())


def a_step(requests, each, granted, columns):
    """Arguments of `fill_step`: prefixes of fixed buffers, as steps of an engine have them."""
    tokens, packed = requests * each, torch.zeros(8192, dtype=torch.int32)
    grants = packed[1001 : 1001 + 4 * granted].view(4, granted)
    tables = torch.zeros((2, 65, 256), dtype=torch.int32)
    rows = torch.zeros((2, 4096), dtype=torch.int32)
    return (
        packed[:requests], packed[67 : 67 + requests], packed[131 : 132 + requests], grants,
        torch.zeros((65, 4097), dtype=torch.int32), tables, requests, tokens, 16, columns,
        rows[0, :tokens], rows[1, :tokens], rows.long()[:, :tokens], torch.zeros_like(tables)[:, :requests],
    )  # fmt: skip


def bfloats(*shape):
    return torch.ones(shape, dtype=torch.bfloat16)


def a_rotation(tokens):
    caches, ints = bfloats(9, 2, 8, 16, 128), torch.zeros(tokens, dtype=torch.int32)
    weight = bfloats(128)
    table = torch.ones((64, 128))
    qkv = bfloats(tokens, 32 * 128)
    return qkv, ints, table, caches[:, 0], caches[:, 1], ints.long(), weight, weight, 1e-6


SIZES = {
    "fill_step": [
        a_step(1, 1, 0, 1), a_step(16, 1, 1, 16), a_step(17, 4, 3, 70), a_step(1, 1600, 16, 100),
        a_step(64, 1, 64, 256),
    ],
    "add_rms_norm": [
        (bfloats(rows, 1024), bfloats(rows, 1024), bfloats(1024), 1e-6) for rows in (1, 2, 16, 33)
    ],
    "silu_mul": [(bfloats(rows, 6144),) for rows in (1, 2, 16, 33)],
    "silu_mul_limited": [(bfloats(rows, 4608), 10.0) for rows in (1, 2, 16, 33)],
    "embed": [
        (torch.zeros(rows, dtype=torch.int32), bfloats(9, 1024)) for rows in (1, 2, 16, 33)
    ],
    "rotate_and_cache": [a_rotation(tokens) for tokens in (1, 2, 16, 33)],
    **{name: [(bfloats(rows, 512),) for rows in (1, 2, 16, 33)] for name in ("fake_fp8", "fake_mxfp4", "fake_nvfp4")},
    "collapse_norm": [
        (bfloats(rows, 4, 5120), torch.ones((rows, 4)), bfloats(5120), 1e-20)
        for rows in (1, 2, 16, 33)
    ],
    "expand_streams": [
        (bfloats(rows, 5120), bfloats(rows, 4, 5120), torch.ones((rows, 4)), torch.ones((rows, 4, 4)))
        for rows in (1, 2, 16, 33)
    ],
    "fill_indptrs": [
        (torch.zeros(rows, dtype=torch.int32), 16, torch.zeros(99, dtype=torch.int32)[: rows + 1])
        for rows in (1, 2, 16, 33)
    ],
    "fill_walk_plan": [
        (packed[3 : 4 + requests], packed[:requests], 1, 2, 512, 16, packed[1024:][: 264 * 4 * bands].view(bands, 264, 4))
        for packed in (torch.zeros(8192, dtype=torch.int32),)
        for requests, bands in ((1, 1), (2, 1), (13, 1), (16, 3))
    ],
    "token_weights": [
        (torch.zeros((rows, 4096)), torch.zeros(rows), torch.ones(rows)) for rows in (1, 2, 16, 33)
    ],
}  # fmt: skip


@pytest.mark.parametrize("op_name", SIZES)
def test_steps_of_all_sizes_share_one_kernel(compile_for, op_name):
    """Compiling in the middle of serving would take as long as hundreds of steps."""
    kernels = compile_for("nvidia", op_name, SIZES[op_name])

    assert len(kernels) == 1, sorted(kernels)


@pytest.mark.parametrize(
    "op_name", ["add_rms_norm", "silu_mul", "embed", "rotate_and_cache", "fake_fp8"]
)
def test_rows_of_real_widths_move_in_pieces_of_sixteen_bytes(compile_for, op_name):
    (kernel,) = compile_for("nvidia", op_name, SIZES[op_name]).values()

    code = kernel.asm["ptx"]
    assert "ld.global.v4" in code
    assert "st.global.v4" in code
    assert "ld.global.b16" not in code
    assert "st.global.b16" not in code


def test_coefficients_of_streams_know_few_rows_and_many(compile_for):
    sites = [
        (bfloats(rows, 4, 5120), torch.ones((24, 20480)), torch.ones(24), torch.ones(3), 1e-20, 1e-6, 20)
        for rows in (1, 2, 16, 17, 64, 300)
    ]  # fmt: skip

    kernels = compile_for("nvidia", "mix_coefficients", sites)

    assert len(kernels) == 3, sorted(kernels)


@pytest.mark.parametrize("vendor", VENDORS)
def test_draws_of_any_rows_share_two_kernels_wherever_their_slots_lie(compile_for, vendor):
    fixed = torch.zeros(4096, dtype=torch.int32)
    draws = [
        (torch.zeros((rows, 5000)), torch.zeros((99, 5), dtype=torch.int64), fixed[at:][:rows], fixed[7:][:rows])
        for rows, at in ((1, 0), (2, 1), (16, 4), (33, 3), (4000, 2))
    ]  # fmt: skip

    kernels = compile_for(vendor, "draw_rows", draws)

    assert len(kernels) == 2, sorted(kernels)
    assert all(kernel.asm[CODE[vendor]] for kernel in kernels.values())


def test_records_of_odd_sizes_are_read_byte_by_byte(compile_for):
    named = {case.name: case for case in CASES["select_entries"]}
    inputs = named["decode of records keeps to candidates"].make()
    size = inputs[2].shape[-1]
    assert size % 2

    kernels = compile_for("nvidia", "select_entries", [inputs])

    (code,) = (each.asm["ptx"] for key, each in kernels.items() if key[0] == "_score_listed_kernel")
    # A tile has a row for every lane.
    assert code.count("ld.global.b8") >= size - 1
