"""What do norms and activations on Hopper do before the kernel in front of them is done, and what not?

Compiling takes no device.
"""

import importlib.util
import re

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
]
WAIT, GO = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
WIDTH, WARPS = 1024, 2
LOADS_OF_A_ROW = WIDTH // (32 * WARPS * 8)
KINDS = {"x_ptr": "*bf16", "residual_ptr": "*bf16", "weight_ptr": "*bf16", "gate_up_ptr": "*bf16",
    "out_ptr": "*bf16", "eps": "fp32"}  # fmt: skip


def code_of(name, launch):
    """The assembly for rows of WIDTH numbers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tokamak.ops.activation.triton_gated import _silu_mul_kernel
    from tokamak.ops.norm.triton_norms import _rms_norm_kernel

    kernel = _silu_mul_kernel if name == "silu_mul" else _rms_norm_kernel
    launch = dict(launch)
    options = {"num_warps": WARPS, "launch_pdl": launch.pop("launch_pdl", False)}
    constants = {"ADDS": name == "add_rms_norm", "WIDTH": WIDTH, "TILE": WIDTH, **launch}
    names = kernel.arg_names
    runtime = [each for each in names if each not in constants]
    source = ASTSource(
        fn=kernel,
        signature={
            each: KINDS.get(each, "i32") if each in runtime else "constexpr" for each in names
        },
        constexprs={(names.index(each),): constants[each] for each in names if each in constants},
        attrs={
            (names.index(each),): [["tt.divisibility", 16]] for each in runtime if each != "eps"
        },
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.mark.parametrize(
    ("name", "ahead"), [("rms_norm", LOADS_OF_A_ROW), ("add_rms_norm", LOADS_OF_A_ROW), ("silu_mul", 0)]
)  # fmt: skip
def test_only_the_weight_of_a_norm_is_read_before_the_kernel_in_front_is_done(name, ahead):
    from tokamak.ops.triton_overlap import OVERLAPPED

    code = code_of(name, OVERLAPPED)

    before, after = code[: code.index(WAIT)], code[code.index(WAIT) :]
    assert code.count(WAIT) == code.count(GO) == 1
    assert before.index(GO) >= 0
    assert len(re.findall(r"ld\.global", before)) == ahead
    assert "st.global" not in before
    assert "ld.global" in after


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_mul"])
def test_a_kernel_in_order_lets_nothing_begin_and_waits_for_nothing(name):
    from tokamak.ops.triton_order import IN_ORDER

    assert "griddepcontrol" not in code_of(name, IN_ORDER)


@pytest.mark.parametrize("op_name", ["rms_norm", "add_rms_norm", "silu_mul"])
def test_hopper_prefers_the_kernels_that_overlap(op_name):
    from dataclasses import replace

    from tests.support.configs import GPU
    from tokamak.ops.load import load_backends
    from tokamak.ops.registry import OPS

    load_backends()
    has = replace(GPU, libraries=frozenset({"triton"}))

    found = [OPS[op_name].bind(replace(has, arch=arch))[1].backend for arch in ("sm90", "sm80")]

    assert found == ["triton_sm90", "triton"]


@pytest.mark.parametrize(
    "op_name",
    [
        "collapse_norm", "engram_gate", "expand_streams", "fake_mxfp4", "fold_groups", "grouped_linear", "mix_coefficients",
        "moe_route_rooted", "rotate_pairs", "rotate_write", "scaled_linear", "select_entries", "sparse_attention",
        "write_records", "write_rows",
    ],
)  # fmt: skip
def test_a_kernel_that_begins_early_waits_once_in_every_program(compile_for, op_name):
    import torch

    from tests.support.op_cases import moved, ops_with_cases
    from tokamak.ops.load import load_backends

    load_backends()
    cases = next(cases for op, cases in ops_with_cases() if op.name == op_name)
    on_device = [moved(case.make(), torch.device("meta")) for case in cases]

    kernels = compile_for("nvidia", op_name, on_device[::4])

    early = [each.asm["ptx"] for each in kernels.values() if GO in each.asm["ptx"]]
    assert early
    assert all(code.count(WAIT) == code.count(GO) == 1 for code in early)
    assert all("st.global" not in code[: code.index(WAIT)] for code in early)
