"""Are 8-bit floating-point weights read with the right scales, and refused where those are not understood?"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.steps import ModelDriver, a_build
from tests.support.tiny import (
    llama_config,
    qwen3_moe_config,
    tiny_weights,
    write_checkpoint,
    write_json,
)
from tokamak.checkpoint.load import load_model, load_random
from tokamak.checkpoint.read import Reader
from tokamak.checkpoint.scaled import join_scales
from tokamak.checkpoint.source import open_checkpoint
from tokamak.checkpoint.upload import Uploader
from tokamak.core.weight import DenseWeight, ScaledWeight, concatenate
from tokamak.errors import CheckpointError, UnsupportedModelError
from tokamak.models.registry import find

PROMPT = [5, 17, 99, 3, 250, 41, 7]
NAME = "model.layers.0.self_attn.q_proj.weight"
MOST = 448.0
"""The largest number of float8_e4m3fn."""


def fp8(rows, columns):
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}  # fmt: skip


def compressed(**weights):
    group = {
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, **weights},
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


SCHEMES = {
    "blocks": (fp8(32, 16), "weight_scale_inv", (32, 16)),
    "blocks that hang over": (fp8(40, 24), "weight_scale_inv", (40, 24)),
    "one scale a tensor": ({"quant_method": "fp8"}, "weight_scale", None),
    "rows": (compressed(strategy="channel"), "weight_scale", (1, 10**6)),
    "compressed blocks": (
        compressed(strategy="block", block_structure=[16, 32]),
        "weight_scale",
        (16, 32),
    ),
}


def halves(weight, block):
    """Codes and scales of a weight in blocks, and the numbers they stand for."""
    rows, columns = weight.shape
    high, wide = (rows, columns) if block is None else (block[0], min(block[1], columns))
    scales = torch.empty(-(-rows // high), -(-columns // wide))
    codes, exact = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty_like(weight)
    for down in range(scales.shape[0]):
        for right in range(scales.shape[1]):
            at = (slice(down * high, (down + 1) * high), slice(right * wide, (right + 1) * wide))
            scales[down, right] = weight[at].abs().max() / MOST
            codes[at] = (weight[at] / scales[down, right]).to(torch.float8_e4m3fn)
            exact[at] = codes[at].float() * scales[down, right]
    return codes, scales if block is not None else scales.view(()), exact


def projections(weights):
    return [name for name in weights if name.endswith("_proj.weight")]


def write_scaled(folder, scheme, change=lambda tensors: None):
    """A checkpoint with 8-bit projections, and the numbers that these stand for."""
    said, suffix, block = SCHEMES[scheme]
    config = llama_config(quantization_config=said)
    tensors = tiny_weights(config)
    plain = dict(tensors)
    for name in projections(plain):
        tensors[name], scales, plain[name] = halves(plain[name], block)
        tensors[name.removesuffix("weight") + suffix] = scales
    change(tensors)
    folder.mkdir(exist_ok=True)
    save_file({n: w.contiguous() for n, w in tensors.items()}, folder / "model.safetensors")
    write_json(folder / "config.json", config)
    return folder, plain


def scores(path):
    checkpoint = open_checkpoint(path)
    model = find(checkpoint.architecture).from_config(checkpoint.config, a_build())
    load_model(model, checkpoint)
    return ModelDriver(model).step({"a": PROMPT})["a"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_with_scales_is_the_model_of_the_numbers_they_stand_for(tmp_path, scheme):
    folder, plain = write_scaled(tmp_path / "scaled", scheme)
    whole = write_checkpoint(tmp_path / "plain", llama_config(), weights=plain)

    found, expected = scores(folder), scores(whole)

    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_are_part_of_their_weight_and_of_no_other_name(tmp_path, scheme):
    folder, plain = write_scaled(tmp_path / "scaled", scheme)
    checkpoint = open_checkpoint(folder)

    weight = Reader().read(checkpoint.entry(NAME))

    assert set(checkpoint.names()) == set(plain)
    assert "quantization_config" not in checkpoint.config
    assert isinstance(weight, ScaledWeight)
    assert torch.equal(weight.dense(torch.float32), plain[NAME])
    assert checkpoint.facts().parameters == sum(each.numel() for each in plain.values())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scaled_weights_arrive_on_a_device_with_their_scales(tmp_path, scheme):
    folder, _ = write_scaled(tmp_path / "scaled", scheme)
    weight = Reader().read(open_checkpoint(folder).entry(NAME))

    found = Uploader(torch.device("cpu"), buffer_bytes=100).weight(weight)

    assert isinstance(found, ScaledWeight)
    assert torch.equal(found.dense(torch.float32), weight.dense(torch.float32))


@pytest.mark.parametrize(
    ("block", "rows", "kind"),
    [
        ((32, 16), (64, 32, 20), ScaledWeight), ((32, 16), (64, 20, 32), DenseWeight),
        ((1, 64), (3, 5, 1), ScaledWeight), (None, (3, 5, 1), ScaledWeight),
    ],
)  # fmt: skip
def test_stacked_weights_keep_their_numbers_whatever_their_blocks(block, rows, kind):
    generator, parts, exact = torch.Generator().manual_seed(5), [], []
    for each in rows:
        codes, scales, numbers = halves(torch.randn(each, 64, generator=generator), block)
        parts.append(
            ScaledWeight(
                codes, scales.view(-1, scales.shape[-1] if block else 1), block or (each, 64)
            )
        )
        exact.append(numbers)

    found = concatenate(parts)

    assert isinstance(found, kind)
    assert torch.equal(found.dense(torch.float32), torch.cat(exact))


def test_a_scaled_weight_beside_a_plain_one_keeps_its_numbers():
    codes, scales, exact = halves(torch.randn(4, 64), (1, 64))
    plain = torch.randn(2, 64).bfloat16()

    found = concatenate([ScaledWeight(codes, scales, (1, 64)), DenseWeight(plain)])

    assert torch.equal(found.dense(torch.float32), torch.cat([exact, plain.float()]))


def test_a_weight_without_scales_is_named(tmp_path):
    lost = NAME.removesuffix("weight") + "weight_scale_inv"

    with pytest.raises(CheckpointError, match="q_proj") as refusal:
        open_checkpoint(write_scaled(tmp_path / "a", "blocks", lambda t: t.pop(lost))[0])

    assert "weight_scale_inv" in str(refusal.value)


def test_scales_of_other_blocks_are_refused_with_both_shapes(tmp_path):
    name = NAME.removesuffix("weight") + "weight_scale_inv"

    def cut(tensors):
        tensors[name] = tensors[name][:, :-1]

    with pytest.raises(CheckpointError, match=r"shape \[2, 3\].* expected \[2, 4\]"):
        open_checkpoint(write_scaled(tmp_path / "a", "blocks", cut)[0])


def test_8_bit_weights_that_no_config_explains_are_refused(tmp_path):
    folder, _ = write_scaled(tmp_path / "scaled", "blocks")
    write_json(folder / "config.json", llama_config())

    with pytest.raises(UnsupportedModelError, match="F8_E4M3"):
        scores(folder)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "fmt": "e5m2"},
        compressed(strategy="group", group_size=32),
        compressed(num_bits=4, strategy="channel"),
        compressed(symmetric=False, strategy="channel"),
        compressed(strategy="channel") | {"kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "awq", "bits": 4},
    ],
)
def test_a_scheme_that_means_something_else_is_refused(tmp_path, said):
    write_json(tmp_path / "config.json", llama_config(quantization_config=said))

    with pytest.raises(UnsupportedModelError, match=said["quant_method"]):
        open_checkpoint(tmp_path)


EIGHT_BITS = {"linear": "fp8", "scaled_experts": "reference"}
"""What a GPU computes, on a CPU."""


@pytest.mark.parametrize(
    "config",
    [llama_config(), qwen3_moe_config(moe_intermediate_size=64)],
    ids=["dense", "with experts"],
)
def test_random_weights_have_the_format_that_the_config_says(tmp_path, config):
    said = fp8(32, 32) | {"modules_to_not_convert": ["lm_head", "model.layers.1.self_attn.o_proj"]}
    write_json(tmp_path / "config.json", config | {"quantization_config": said})
    checkpoint = open_checkpoint(tmp_path)

    def scored(scheme, prefer):
        build = a_build(prefer=prefer)
        model = find(checkpoint.architecture).from_config(checkpoint.config, build)
        load_random(model, 3, scheme=scheme)
        return ModelDriver(model).step({"a": PROMPT})["a"], model, build

    eight, model, build = scored(checkpoint.scheme, EIGHT_BITS)
    widened, _, _ = scored(checkpoint.scheme, {})
    plain, _, _ = scored(None, {})

    forms = {
        name: each.form for name, (each, _) in model.weights().items() if hasattr(each, "form")
    }
    assert forms["layers.0.out"] == "fp8"
    assert forms["layers.1.out"] != "fp8"
    assert "fp8" not in forms["head"]
    if "layers.0.router" in forms:
        assert forms["layers.0.router"] != "fp8"
        assert model.weights()["layers.0.gate_up"][0].scaled is not None
        assert build.choices["scaled_experts"].backend == "reference"
    # Rounded weights differ from plain ones, and rounded rows from plain rows, by little each.
    scale = plain.abs().max()
    assert 0 < (widened - plain).abs().max() / scale < 0.2
    assert 0 < (eight - widened).abs().max() / scale < 0.2


def test_facts_count_the_numbers_that_are_stored_in_8_bits(tmp_path):
    folder, plain = write_scaled(tmp_path / "scaled", "blocks")
    write_json(tmp_path / "config.json", llama_config(quantization_config=fp8(32, 16)))

    stored, expected = open_checkpoint(folder).facts(), open_checkpoint(tmp_path).facts()

    assert stored.scaled_parameters == sum(plain[name].numel() for name in projections(plain))
    assert expected.scaled_parameters == stored.scaled_parameters
    assert expected.parameters > expected.scaled_parameters


def test_exceptions_are_names_ends_of_names_and_patterns():
    found = open_scheme(
        fp8(32, 32) | {"modules_to_not_convert": ["a.b", "re:.*norm.*", "gate_proj"]}
    )

    assert found.covers("model.layers.0.self_attn.q_proj.weight", (8, 8))
    assert not found.covers("model.a.b.weight", (8, 8))
    assert not found.covers("model.a.b.c.weight", (8, 8))
    assert not found.covers("model.layers.0.mlp.gate_proj.weight", (8, 8))
    assert not found.covers("x.q_norm.weight", (8, 8))
    assert not found.covers("model.layers.0.self_attn.q_proj.bias", (8,))
    assert not found.covers("model.embed_tokens.weight", (8, 8))


def open_scheme(said):
    return join_scales(Path("config.json"), {"quantization_config": said}, {})[2]
