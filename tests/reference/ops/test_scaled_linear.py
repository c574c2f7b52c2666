"""Are rows and weights of 8 bits rounded, scaled and multiplied as the definitions say, and who takes which weight?"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tokamak.core.weight import DenseWeight, ScaledWeight, widened
from tokamak.device.facts import cpu_facts
from tokamak.errors import NoBackendError
from tokamak.ops.linear import pack_with_reason
from tokamak.ops.linear.device import ScaledLinear
from tokamak.ops.load import load_backends
from tokamak.ops.moe_experts import moe_experts, scaled_experts
from tokamak.ops.moe_experts.cases import scaled_experts_cases
from tokamak.ops.quant_linear import ScaleBlocks, group_of, library, scaled_linear
from tokamak.ops.quant_linear.cases import scaled_linear_cases
from tokamak.ops.quant_linear.reference import fake_quantized
from tokamak.ops.quantize import quantize_rows
from tokamak.quant.weights import fp8_weight

load_backends()

H200 = replace(cpu_facts(), vendor="nvidia", arch="sm90", libraries=frozenset({"triton"}))
MI300 = replace(cpu_facts(), vendor="amd", arch="gfx942", libraries=frozenset({"triton"}))
E4M3 = np.concatenate(
    [sign * np.array([0, *(m / 8 * 2.0**-6 for m in range(1, 8)), *((1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8))])[:-1] for sign in (1, -1)]
)  # fmt: skip
"""Every number of E4M3, from its definition."""


def scaled_weight(values, block):
    return fp8_weight(values, block, powers_of_two=False)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_code_is_the_nearest_number_there_is():
    x = numbers(6, 128) * 40

    codes, scales = quantize_rows(x, 128, False)

    assert np.allclose(scales[:, 0], x.abs().amax(1) / 448, rtol=1e-6)
    wide = (x / scales).double().numpy()
    nearest = np.abs(wide[..., None] - E4M3).min(-1)
    assert np.allclose(np.abs(codes.double().numpy() - wide), nearest, atol=1e-4)


def test_powers_of_two_are_the_least_that_hold_the_group():
    x = numbers(50, 64, seed=1)

    _, scales = quantize_rows(x, 32, True)

    need = x.view(50, 2, 32).abs().amax(-1) / 448
    assert torch.equal(scales.log2(), scales.log2().round())
    assert ((scales >= need * (1 - 1e-6)) & (scales / 2 < need * (1 + 1e-6))).all()


def test_groups_of_zeros_and_of_tiny_numbers_stay_so():
    x = torch.zeros(2, 128)
    x[1, 5] = 3e-9

    codes, scales = quantize_rows(x, 128, False)

    assert scales.isfinite().all()
    assert (codes.float() * scales)[0].abs().max() == 0
    assert (codes.float() * scales)[1].abs().max() < 1e-8


@pytest.mark.parametrize("case", scaled_linear_cases, ids=str)
def test_products_are_those_of_the_numbers_that_codes_stand_for(case):
    x, codes, scales, blocks, dtype = case.make()
    rows, columns = fake_quantized(x, blocks).double(), codes.shape[1]
    expected = torch.zeros(x.shape[0], codes.shape[0], dtype=torch.float64)
    for feature in range(codes.shape[0]):
        for first in range(0, columns, blocks.columns):
            part = slice(first, first + blocks.columns)
            scale = scales[feature // blocks.rows, first // blocks.columns].double()
            expected[:, feature] += rows[:, part] @ codes[feature, part].double() * scale

    found = scaled_linear(x, codes, scales, blocks, dtype)

    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=case.tolerance)


def test_rounding_rows_costs_little_accuracy():
    x, weight = numbers(32, 1024, seed=2), numbers(256, 1024, seed=3) / 32
    scaled = scaled_weight(weight, (128, 128))
    exact = x @ weight.T

    found = scaled_linear(x, scaled.codes, scaled.scales, ScaleBlocks(128, 128), torch.float32)

    assert (found - exact).norm() / exact.norm() < 0.04


@pytest.mark.parametrize("case", scaled_experts_cases, ids=str)
def test_experts_of_8_bits_are_near_experts_of_their_numbers(case):
    x, ids, weights, gate_up, up_scales, down, down_scales, blocks = case.make()
    plain = moe_experts(
        x.float(),
        ids,
        weights,
        widened(gate_up, up_scales, blocks[:2]),
        widened(down, down_scales, blocks[:2]),
    )

    found = scaled_experts(*case.make())

    assert found.dtype == x.dtype
    assert found.shape == plain.shape
    if x.shape[0]:
        assert 1e-4 < (found.float() - plain).norm() / plain.norm() < 0.1


def test_groups_fit_the_blocks_of_checkpoints_and_no_others():
    assert group_of(ScaleBlocks(128, 128), 4096) == 128
    assert group_of(ScaleBlocks(1, 4096), 4096) == 128
    assert group_of(ScaleBlocks(32, 32), 4096) == 32
    assert group_of(ScaleBlocks(40, 24), 4096) is None
    assert group_of(ScaleBlocks(16, 16), 4096) is None


def packed(weight, facts, dtype=torch.bfloat16, prefer=None):
    form, why = pack_with_reason(
        weight, dtype=dtype, exact=False, facts=facts, head=False, prefer=prefer
    )
    return form.form, why


def test_8_bits_are_kept_where_the_device_multiplies_them():
    weight = scaled_weight(numbers(64, 128), (128, 128))
    odd = scaled_weight(numbers(64, 128), (16, 48))

    assert packed(weight, H200) == ("fp8", "8 bits as stored")
    assert packed(weight, MI300)[0] == packed(odd, H200)[0] == "device"
    assert packed(weight, H200, torch.float32)[0] == "device"
    assert packed(weight, H200, prefer="device") == ("device", "asked for")


def test_a_cpu_computes_what_a_gpu_does_when_it_is_asked_to():
    weight = scaled_weight(numbers(64, 128), (32, 32))
    plain = DenseWeight(numbers(64, 128))

    assert packed(weight, cpu_facts(), torch.float32, prefer="fp8") == ("fp8", "asked for")
    assert packed(weight, cpu_facts(), torch.float32)[0] != "fp8"
    # What is not stored in 8 bits keeps a form of its own.
    assert packed(plain, cpu_facts(), torch.float32, prefer="fp8") == packed(
        plain, cpu_facts(), torch.float32
    )
    with pytest.raises(NoBackendError, match="no form 'int3'"):
        packed(weight, H200, prefer="int3")


def test_a_layer_of_8_bits_norms_adds_and_gates_like_one_of_plain_numbers():
    weight = scaled_weight(numbers(96, 64, seed=4) / 8, (32, 32))
    linear = ScaledLinear(weight, cpu_facts())
    x, stream, norm = numbers(3, 64, seed=5), numbers(3, 64, seed=6), numbers(64, seed=7)
    total = x + stream
    normed = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm
    blocks = ScaleBlocks(32, 32)
    products = fake_quantized(normed, blocks) @ weight.dense(torch.float32).T
    gate, up = products.chunk(2, dim=1)

    plain = linear.after_norm(x, stream.clone(), norm, 1e-6)
    gated = linear.gated_after_norm(x, stream.clone(), norm, 1e-6)
    scores = linear.scores_after_norm(total, norm, 1e-6)
    changed = stream.clone()
    linear.after_norm(x, changed, norm, 1e-6)

    # A number near the middle of two codes may be rounded either way.
    for found, expected in (
        (plain, products),
        (gated, torch.nn.functional.silu(gate) * up),
        (scores, products),
    ):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert torch.equal(changed, total)
    assert torch.equal(linear.into(x, stream), linear(x))


@pytest.mark.parametrize("block", [(128, 128), (1, 1 << 30), (32, 32)])
def test_a_weight_is_stored_to_the_nearest_code_of_its_blocks(block):
    values = numbers(200, 130, seed=8)

    weight = scaled_weight(values, block)

    assert isinstance(weight, ScaledWeight)
    assert (weight.dense(torch.float32) - values).norm() / values.norm() < 0.03
    again = scaled_weight(weight.dense(torch.float32), block)
    assert torch.equal(again.codes.view(torch.uint8), weight.codes.view(torch.uint8))
    zeros = scaled_weight(torch.zeros(4, 4), block).dense(torch.float32)
    assert torch.equal(zeros, torch.zeros(4, 4))


def test_pytorch_multiplies_many_rows_of_whole_blocks_alone():
    square, small = ScaleBlocks(128, 128), ScaleBlocks(32, 32, power_of_two=True)

    assert library.takes(256, 4096, square, torch.bfloat16)
    assert not library.takes(255, 4096, square, torch.bfloat16)
    assert not library.takes(256, 4096, square, torch.float32)
    assert not library.takes(256, 4224, square, torch.bfloat16)
    assert not library.takes(256, 4096, small, torch.bfloat16)
    assert library.suits(square, 4096)
    assert not library.suits(small, 4096)
    assert not library.agrees(torch.device("cpu"))
