"""Are the files of DeepSeek V4 and V4.1 read as the numbers they stand for, and other layouts refused by name?"""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from tests.support.deepseek_files import (
    FP4,
    FP8,
    TABLE,
    V4,
    V41,
    deepseek_config,
    deepseek_shapes,
    deepseek_weights,
    stored_tensors,
    write_tensors,
)
from tokamak.checkpoint.read import Reader
from tokamak.checkpoint.source import open_checkpoint
from tokamak.checkpoint.upload import Uploader
from tokamak.core.minifloat import UE8M0
from tokamak.core.weight import DenseWeight, PackedWeight, ScaledWeight, concatenate
from tokamak.device.facts import cpu_facts
from tokamak.errors import CheckpointError, UnsupportedModelError
from tokamak.ops.linear import pack_linear
from tokamak.quant.weights import fp8_weight, mxfp4_weight

LINEAR = "layers.1.attn.wq_b"
EXPERT = "layers.1.ffn.experts.0.w1"
TABLE_NAME = "layers.1.engram.embed"
LAYOUTS = pytest.mark.parametrize("block", [V4, V41], ids=["V4", "V4.1"])


@pytest.fixture(scope="module")
def weights():
    return deepseek_weights(deepseek_shapes())


def opened(folder, block, tensors, shards=3, **said):
    return open_checkpoint(write_tensors(folder, deepseek_config(block, **said), tensors, shards))


def same_bits(left, right):
    """Equal, the signs of zeros included."""
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))  # fmt: skip


@LAYOUTS
def test_every_tensor_of_a_release_is_read_to_the_bit(tmp_path, weights, block):
    tensors, exact = stored_tensors(weights, block)
    checkpoint, reader = opened(tmp_path, block, tensors), Reader()

    found = {name: reader.read(checkpoint.entry(name)) for name in checkpoint.names()}

    assert set(found) == set(weights)
    for name, weight in found.items():
        kind = PackedWeight if FP4.search(name) else ScaledWeight if FP8.search(name) or TABLE.search(name) else DenseWeight  # fmt: skip
        assert isinstance(weight, kind), name
        assert weight.shape == weights[name].shape, name
        assert same_bits(weight.dense(torch.float32), exact[name]), name
        assert torch.equal(weight.dense(torch.bfloat16).float(), exact[name]) or kind is DenseWeight


@LAYOUTS
def test_codes_and_scales_come_back_from_the_numbers(tmp_path, weights, block):
    # Numbers of the format: a block whose largest number was rounded down to half the range gets half the scale.
    tensors, _ = stored_tensors(stored_tensors(weights, block)[1], block)
    checkpoint, reader = opened(tmp_path, block, tensors), Reader()

    for name in (LINEAR, EXPERT, TABLE_NAME):
        weight = reader.read(checkpoint.entry(f"{name}.weight"))
        dense = weight.dense(torch.float32)
        again = mxfp4_weight(dense) if name == EXPERT else fp8_weight(dense, weight.block)

        assert same_bits(again.codes, weight.codes)
        assert same_bits(again.scales, weight.scales)


def test_facts_count_numbers_and_all_bytes(tmp_path, weights):
    tensors, _ = stored_tensors(weights, V41)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 160, "intermediate_size": 96, "vocab_size": 40, "max_position_embeddings": 64}  # fmt: skip
    folder = write_tensors(tmp_path, deepseek_config(V41) | sizes, tensors)

    facts = open_checkpoint(folder).facts()

    assert facts.parameters == sum(each.numel() for each in weights.values())
    assert facts.weight_bytes == sum(each.nbytes for each in tensors.values())


def test_scales_may_be_float32_under_the_older_name(tmp_path, weights):
    tensors, exact = stored_tensors(weights, V4)
    for name in [name for name in tensors if name.endswith(".scale") and "experts.0" not in name]:
        tensors[name.replace(".scale", ".weight_scale_inv")] = tensors.pop(name).float()
    checkpoint = opened(tmp_path, V4, tensors)

    weight = Reader().read(checkpoint.entry(f"{LINEAR}.weight"))

    assert weight.scales.dtype == torch.float32
    assert same_bits(weight.dense(torch.float32), exact[f"{LINEAR}.weight"])


@pytest.mark.parametrize("place", ["quantization_config", "text_config", "config", "nowhere"])
def test_experts_of_four_bits_may_be_said_in_any_of_three_places_or_left_out(tmp_path, weights, place):  # fmt: skip
    tensors, exact = stored_tensors(weights, V4)
    config = deepseek_config(V4)
    del config["quantization_config"]["expert_dtype"]
    said = {"quantization_config": config["quantization_config"], "text_config": config.setdefault("text_config", {}), "config": config, "nowhere": {}}  # fmt: skip
    said[place]["expert_dtype"] = "fp4"
    checkpoint = open_checkpoint(write_tensors(tmp_path, config, tensors))

    weight = Reader().read(checkpoint.entry(f"{EXPERT}.weight"))

    assert same_bits(weight.dense(torch.float32), exact[f"{EXPERT}.weight"])


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, change):
    def do(tensors):
        tensors[name] = change(tensors[name])

    return do


def twice(tensors):
    tensors[f"{LINEAR}.weight_scale_inv"] = tensors[f"{LINEAR}.scale"].float()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(f"{LINEAR}.scale"), rf"{LINEAR}.weight.* no tensor of scales.*weight_scale_inv or scale"),
        (drop(f"{EXPERT}.scale"), rf"{EXPERT}.weight.* no tensor of scales"),
        (drop(f"{TABLE_NAME}.scale"), rf"{TABLE_NAME}.weight.* no tensor of scales"),
        (twice, rf"two tensors of scales, {LINEAR}.weight_scale_inv and {LINEAR}.scale"),
        (put(f"{LINEAR}.scale", lambda s: s[:, :-1].contiguous()), rf"{LINEAR}.scale.* shape \[8, 2\].* expected \[8, 3\]"),
        (put(f"{LINEAR}.scale", lambda s: s.t().contiguous()), rf"{LINEAR}.scale.* shape \[3, 8\].* expected \[8, 3\]"),
        (put(f"{EXPERT}.scale", lambda s: s[:, :-1].contiguous()), rf"{EXPERT}.scale.* shape \[96, 4\].* expected \[96, 5\]"),
        (put(f"{LINEAR}.scale", lambda s: s.view(torch.uint8)), rf"{LINEAR}.scale.* number format U8"),
        (put(f"{EXPERT}.scale", lambda s: s.view(torch.uint8)), rf"{EXPERT}.scale.* number format U8"),
        (put(f"{TABLE_NAME}.scale", lambda s: s.double()), rf"{TABLE_NAME}.scale.* number format F64"),
        (put(f"{EXPERT}.weight", lambda w: w[:, :-8].contiguous()), rf"{EXPERT}.weight.* 144 columns in 72 bytes"),
    ],
)  # fmt: skip
def test_another_layout_of_scales_is_refused_by_name(tmp_path, weights, change, message):
    tensors, _ = stored_tensors(weights, V41)
    change(tensors)

    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, V41, tensors)


def test_tiles_of_the_other_release_are_refused(tmp_path, weights):
    tensors, _ = stored_tensors(weights, V4)

    with pytest.raises(CheckpointError, match="expected"):
        opened(tmp_path, V41, tensors)


def test_bytes_of_scales_need_a_config_that_says_what_they_are(tmp_path, weights):
    tensors, _ = stored_tensors(weights, V41)

    with pytest.raises(CheckpointError, match="number format F8_E8M0"):
        opened(tmp_path, V41, tensors, scale_fmt=None)


@pytest.mark.parametrize("said", [{"scale_fmt": "e5m3"}, {"expert_dtype": "int4"}])
def test_words_that_are_not_known_are_refused(tmp_path, weights, said):
    tensors, _ = stored_tensors(weights, V41)

    with pytest.raises(UnsupportedModelError, match="fp8"):
        opened(tmp_path, V41, tensors, **said)


def test_bytes_are_no_pairs_where_experts_are_said_to_have_eight_bits(tmp_path, weights):
    tensors, _ = stored_tensors(weights, V41)

    checkpoint = opened(tmp_path, V41, tensors, expert_dtype="fp8")

    assert checkpoint.entry(f"{EXPERT}.weight").format.name == "I8"
    assert f"{EXPERT}.scale" in checkpoint.names()


def test_a_file_written_by_hand_is_read_by_its_header(tmp_path):
    """Two rows of 32: codes 0 to 15 twice; scales 2^-1 and 2^3. Scales lie at an odd place."""
    codes = bytes(0x10 * (2 * i + 1) + 2 * i for i in range(8)) * 2 * 2
    header = json.dumps(
        {
            "a.pad": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "a.scale": {"dtype": "F8_E8M0", "shape": [2, 1], "data_offsets": [3, 5]},
            "a.weight": {"dtype": "I8", "shape": [2, 16], "data_offsets": [5, 37]},
        }
    ).encode()
    data = bytes(3) + bytes([126, 130]) + codes
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (tmp_path / "config.json").write_text(json.dumps(deepseek_config(V41)))

    found = Reader().read(open_checkpoint(tmp_path).entry("a.weight")).dense(torch.float32)

    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    row = [*grid, *[-each for each in grid]] * 2
    assert found.tolist() == [[each * 0.5 for each in row], [each * 8 for each in row]]


def test_packed_weights_arrive_on_a_device_and_stack(weights):
    parts = [mxfp4_weight(weights[f"layers.1.ffn.experts.0.{name}.weight"]) for name in ("w1", "w3")]  # fmt: skip
    uploader = Uploader(torch.device("cpu"), buffer_bytes=1000)

    found = concatenate([uploader.weight(part) for part in parts])

    assert isinstance(found, PackedWeight)
    assert found.scales.dtype == UE8M0
    dense = [part.dense(torch.float32) for part in parts]
    assert same_bits(found.dense(torch.float32), torch.cat(dense))


def test_stacked_tiles_keep_their_bytes_or_their_numbers(weights):
    whole = fp8_weight(weights[f"{LINEAR}.weight"], V41)
    ragged = fp8_weight(weights[f"{LINEAR}.weight"][:40], V41)
    rows = fp8_weight(weights[f"{LINEAR}.weight"], (1, 32))
    numbers = ScaledWeight(whole.codes, whole.scales.float(), V41)

    kept, both = concatenate([whole, ragged]), concatenate([whole, numbers])
    dense = concatenate([ragged, rows])

    assert isinstance(kept, ScaledWeight)
    assert kept.scales.dtype == UE8M0
    assert isinstance(both, ScaledWeight)
    assert both.scales.dtype == torch.float32
    assert isinstance(dense, DenseWeight)
    for found, parts in ((kept, (whole, ragged)), (both, (whole, whole)), (dense, (ragged, rows))):
        assert torch.equal(found.dense(torch.float32), torch.cat([part.dense(torch.float32) for part in parts]))  # fmt: skip


@pytest.mark.parametrize("name", [LINEAR, EXPERT])
def test_linear_layers_multiply_with_the_numbers_codes_stand_for(weights, name):
    numbers = weights[f"{name}.weight"]
    weight = mxfp4_weight(numbers) if name == EXPERT else fp8_weight(numbers, V41)
    x = torch.randn(3, numbers.shape[1], generator=torch.Generator().manual_seed(1))

    packed = pack_linear(weight, dtype=torch.float32, exact=True, facts=cpu_facts())

    expected = x @ weight.dense(torch.float32).T
    assert torch.allclose(packed(x), expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_one_file_needs_no_index(tmp_path, weights):
    tensors, exact = stored_tensors(weights, V41)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(deepseek_config(V41)))

    weight = Reader().read(open_checkpoint(tmp_path).entry(f"{EXPERT}.weight"))

    assert same_bits(weight.dense(torch.float32), exact[f"{EXPERT}.weight"])
