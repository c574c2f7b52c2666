"""What do the kernels of few rows become on a chip: are weights asked for first, and does no lane wait for another?

Compiling takes no device.
"""

import importlib.util
import re

import pytest

from tokamak.ops.linear.tile import Tile

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
]
HOPPER, CDNA = ("cuda", 90, 32), ("hip", "gfx942", 64)
POINTERS = ("x_ptr", "weight_ptr", "norm_weight_ptr", "out_ptr")
NUMBERS = ("rows", "features", "columns", "stride_x_row", "stride_out_row")
LANES, CORES = Tile(4, 1024, 4), Tile(16, 64, 4, 4)
REGISTERS = Tile(16, 64, 4, registers=True)
NEIGHBOURS = {
    "after_norm": {"NORM": True, "GATED": False, "INTO": False},
    "gated": {"NORM": True, "GATED": True, "INTO": False},
    "into": {"NORM": False, "GATED": False, "INTO": True},
}
WAIT = "griddepcontrol.wait"


def code_of(tile, *, rows, columns, neighbours="into", target=HOPPER, overlaps=False):
    """The assembly of a tile's kernel for whole weights of aligned rows."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    from tokamak.ops.linear import triton_few, triton_sm90_registers
    from tokamak.ops.linear.triton_sm90 import OVERLAPPED

    launch = dict(OVERLAPPED if overlaps else triton_few.IN_ORDER)
    options = {"num_warps": tile.warps, "num_stages": max(tile.stages, 1)}
    if launch.pop("launch_pdl", False):
        options["launch_pdl"] = True
    constants = {
        "TILE_FEATURES": tile.features, "TILE_COLUMNS": tile.columns, "ROWS": rows,
        "COLUMNS": columns, "WARPS": tile.warps, "WHOLE": True, "LANE": 8, "COLUMNS_AHEAD": 512,
        "OVERLAPS": overlaps, **NEIGHBOURS[neighbours], **launch,
    }  # fmt: skip
    kernel = (
        triton_sm90_registers._registers_kernel
        if tile.registers
        else triton_few._cores_kernel
        if tile.stages
        else triton_few._lanes_kernel
    )
    names = kernel.arg_names
    kinds = dict.fromkeys(POINTERS, "*bf16") | dict.fromkeys(NUMBERS, "i32") | {"eps": "fp32"}
    source = (GluonASTSource if tile.registers else ASTSource)(
        fn=kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): constants[name] for name in names if name in constants},
        attrs={
            (at,): [["tt.divisibility", 16]]
            for at, name in enumerate(names)
            if name in kinds and name not in ("rows", "eps")
        },
    )
    compiled = compile(source, target=GPUTarget(*target), options=options)
    return compiled.asm["amdgcn" if target == CDNA else "ptx"]


def count(pattern, code):
    return len(re.findall(pattern, code))


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@pytest.mark.parametrize("tile", [LANES, CORES], ids=["lanes", "cores"])
@pytest.mark.parametrize("target", [HOPPER, CDNA], ids=["nvidia", "amd"])
def test_kernels_compile_for_both_vendors(target, tile, neighbours):
    assert code_of(tile, rows=8, columns=2048, neighbours=neighbours, target=target)


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_operands_of_tensor_cores_come_in_pieces_of_sixteen_bytes(rows, neighbours):
    code = code_of(REGISTERS, rows=rows, columns=2048, neighbours=neighbours)

    weights = 2 if neighbours == "gated" else 1
    assert count("mma.sync", code) == weights * 2048 // 16 // REGISTERS.warps * rows // 8
    assert count(r"ld\.global\.v4", code) >= 2048 // 64
    assert "cp.async" not in code


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_lanes_wait_for_each_other_as_often_for_many_columns_as_for_few(rows):
    few, many = (code_of(LANES, rows=rows, columns=columns) for columns in (1024, 8192))

    for wait in (r"bar\.sync", r"shfl\.sync", r"ld\.shared"):
        assert count(wait, many) == count(wait, few), wait
    assert count(r"ld\.global\.v4", many) > count(r"ld\.global\.v4", few)


@pytest.mark.parametrize("rows", [8, 16])
def test_warps_wait_for_each_other_as_often_for_many_columns_as_for_few(rows):
    few, many = (code_of(REGISTERS, rows=rows, columns=columns) for columns in (256, 2048))

    for wait in (r"bar\.sync", r"shfl\.sync", r"ld\.shared"):
        assert count(wait, many) == count(wait, few), wait


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_an_overlapping_kernel_asks_for_weights_and_nothing_else_before_it_waits(neighbours):
    weights = 2 if neighbours == "gated" else 1

    lanes = code_of(LANES, rows=4, columns=2048, neighbours=neighbours, overlaps=True)
    cores = code_of(CORES, rows=8, columns=2048, neighbours=neighbours, overlaps=True)
    registers = code_of(REGISTERS, rows=8, columns=2048, neighbours=neighbours, overlaps=True)

    loads = r"(?:ld\.global|cp\.async\.c[ag]\.shared)"
    a_tile = LANES.features * LANES.columns // (32 * LANES.warps * 8)
    assert count(loads, lanes[: lanes.index(WAIT)]) == weights * a_tile
    a_tile = REGISTERS.features * REGISTERS.columns // (32 * 8)
    assert count(loads, registers[: registers.index(WAIT)]) == weights * a_tile
    assert count(loads, cores[: cores.index(WAIT)]) == 0
    assert count(r"bulk\.prefetch\.L2", cores[: cores.index(WAIT)]) == weights
    assert not any(
        count("st.global", code[: code.index(WAIT)]) for code in (lanes, cores, registers)
    )


def test_a_kernel_in_order_neither_asks_ahead_nor_waits():
    for tile in (LANES, CORES, REGISTERS):
        code = code_of(tile, rows=8, columns=2048)
        assert "griddepcontrol" not in code
        assert "bulk.prefetch" not in code
