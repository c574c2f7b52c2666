"""Do the Triton kernels of routing and experts pass, interpreted, the checks of a device, and compile for both vendors?"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.reference.ops.test_triton_compile import CODE, VENDORS

ROOT = Path(__file__).resolve().parents[3]
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
]
LOCAL_MEMORY = {"nvidia": 232448, "amd": 65536}
"""Bytes a program may have."""


@pytest.mark.parametrize("checks", ["tests/gpu/test_moe.py", "tests/gpu/test_moe_limited.py"])
def test_interpreted_kernels_route_rows_and_send_them_through_their_experts(checks):
    # Whether Triton interprets is settled when it is imported, so the checks have a process of their own.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }

    done = subprocess.run(
        [*command, checks],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def a_step(rows, dtype=torch.bfloat16):
    """Rows and experts of Qwen3-30B-A3B, without memory."""
    width, inner, experts, chosen = 2048, 768, 128, 8
    numbers = {"dtype": dtype, "device": "meta"}
    return (
        torch.empty(rows, width, **numbers),
        torch.empty(rows, chosen, dtype=torch.int32, device="meta"),
        torch.empty(rows, chosen, device="meta"),
        torch.empty(experts, 2 * inner, width, **numbers),
        torch.empty(experts, width, inner, **numbers),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vendor", VENDORS)
def test_kernels_of_steps_of_all_sizes_compile_and_fit_the_device(
    compile_for,
    monkeypatch,
    vendor,
    dtype,
):
    monkeypatch.setattr(torch.version, "hip", "7.0" if vendor == "amd" else None)

    steps = [a_step(rows, dtype) for rows in (1, 8, 400, 900, 8192)]
    kernels = compile_for(vendor, "moe_experts", steps)

    # Two for few pairs; for many, with each of four tiles one to group and two products, and a sum.
    assert len(kernels) == 15
    assert all(kernel.asm[CODE[vendor]] for kernel in kernels.values())
    assert max(kernel.metadata.shared for kernel in kernels.values()) <= LOCAL_MEMORY[vendor]


def test_decode_steps_of_all_sizes_share_their_kernels(compile_for):
    kernels = compile_for("nvidia", "moe_experts", [a_step(rows) for rows in (3, 4, 16, 17, 128)])

    assert len(kernels) == 4


@pytest.mark.parametrize("vendor", VENDORS)
def test_routing_compiles_once_for_all_rows(compile_for, vendor):
    scores = [torch.empty(rows, 128, dtype=torch.bfloat16) for rows in (1, 2, 16, 300)]

    kernels = compile_for(vendor, "moe_route", [(each, 8, True) for each in scores])

    (kernel,) = kernels.values()
    assert kernel.asm[CODE[vendor]]


def a_limited_step(op_name, rows):
    """Rows and experts of DeepSeek V4.1 Flash in bfloat16, without memory."""
    width, inner, experts, chosen = 5120, 2304, 384, 6

    def numbers(dtype, *shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    routed = (
        numbers(torch.bfloat16, rows, width),
        numbers(torch.int32, rows, chosen),
        numbers(torch.float32, rows, chosen),
    )
    if op_name == "moe_experts_limited":
        plain = torch.bfloat16
        matrices = (
            numbers(plain, experts, 2 * inner, width),
            numbers(plain, experts, width, inner),
        )
        return *routed, *matrices, 10.0
    matrices = (
        numbers(torch.uint8, experts, 2 * inner, width // 2),
        numbers(torch.float8_e8m0fnu, experts, 2 * inner, width // 32),
        numbers(torch.uint8, experts, width, inner // 2),
        numbers(torch.float8_e8m0fnu, experts, width, inner // 32),
    )
    return *routed, *matrices, 32, 10.0


@pytest.mark.parametrize(
    ("vendor", "op_name"),
    [
        ("nvidia", "moe_experts_limited"),
        ("nvidia", "packed_experts_limited"),
        ("amd", "packed_experts_limited"),
    ],
)
def test_experts_with_limits_compile_and_fit_the_device(compile_for, monkeypatch, vendor, op_name):
    monkeypatch.setattr(torch.version, "hip", "7.0" if vendor == "amd" else None)

    steps = [a_limited_step(op_name, rows) for rows in (1, 128)]
    kernels = compile_for(vendor, op_name, steps)

    assert all(kernel.asm[CODE[vendor]] for kernel in kernels.values())
    assert max(kernel.metadata.shared for kernel in kernels.values()) <= LOCAL_MEMORY[vendor]
