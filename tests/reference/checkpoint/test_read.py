"""Does every number format come out as its makers' own dequantiser says?"""

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.tiny import llama_config, tiny_weights
from tests.support.tiny_gguf import write_gguf
from tokamak.checkpoint.entry import (
    DEQUANTISED_FORMATS,
    GROUPED_FORMATS,
    PLAIN_FORMATS,
    TensorEntry,
)
from tokamak.checkpoint.gguf import FORMATS
from tokamak.checkpoint.read import Reader, can_read
from tokamak.checkpoint.safetensors import find_tensors
from tokamak.checkpoint.source import open_checkpoint
from tokamak.core.weight import DenseWeight, GroupedWeight, concatenate

ROWS, COLUMNS = 6, 512

BY_NAME = {form.name: form for form in FORMATS.values()}


def stored(tmp_path, name, seed=0, offset=0, interleaved_heads=0):
    """Random blocks of a format in a file: every code, and scales of every finite size."""
    form = BY_NAME[name]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (ROWS * COLUMNS // form.block_numbers, form.block_bytes))
    blocks = blocks.astype(np.uint8)
    if name in ("F32", "F16", "BF16"):
        kind = {"F32": np.float32, "F16": np.float16}.get(name)
        plain = generator.standard_normal(ROWS * COLUMNS).astype(kind or np.float32)
        raw = plain.tobytes() if kind else plain.view(np.uint16)[1::2].tobytes()
    elif name in GROUPED_FORMATS:
        factors = generator.standard_normal((len(blocks), 2)) * 10.0 ** generator.integers(-7, 4)
        width = 2 if name.endswith("_1") else 1
        blocks[:, : 2 * width] = factors[:, :width].astype("<f2").view(np.uint8)
        raw = blocks.tobytes()
    else:
        raw = blocks.tobytes()
    path = tmp_path / f"{name}.raw"
    path.write_bytes(bytes(offset) + raw)
    return TensorEntry("w", (ROWS, COLUMNS), form, path, offset, "w", interleaved_heads)


def theirs(entry):
    """The gguf package's float32 numbers of an entry."""
    raw = np.frombuffer(entry.file.read_bytes()[entry.offset :], np.uint8).reshape(ROWS, -1)
    with np.errstate(all="ignore"):
        if entry.format.name in ("F32", "F16"):
            kind = np.float32 if entry.format.name == "F32" else np.float16
            return raw.view(kind).astype(np.float32)
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[entry.format.name])


def read(entry):
    with np.errstate(all="ignore"):
        return Reader().read(entry)


@pytest.mark.parametrize("name", [*PLAIN_FORMATS[::2], *GROUPED_FORMATS, *DEQUANTISED_FORMATS])
@pytest.mark.parametrize("seed", range(3))
def test_every_number_is_the_one_the_gguf_package_makes(tmp_path, name, seed):
    entry = stored(tmp_path, name, seed)

    numbers = read(entry).dense(torch.float32).numpy()

    assert np.array_equal(numbers, theirs(entry), equal_nan=True)


def test_bfloat16_is_kept_as_it_is(tmp_path):
    numbers = torch.randn(ROWS, COLUMNS).bfloat16()
    save_file({"w": numbers}, tmp_path / "model.safetensors")

    weight = Reader().read(find_tensors(tmp_path)["w"])

    assert isinstance(weight, DenseWeight)
    assert weight.values.dtype == torch.bfloat16
    assert torch.equal(weight.values, numbers)


def test_every_format_the_gguf_package_dequantises_can_be_read():
    known = {kind.name for kind in gguf.quants._type_traits}

    readable = {form.name for form in FORMATS.values() if can_read(form.name)}

    assert known <= readable


@pytest.mark.parametrize("name", GROUPED_FORMATS)
def test_block_formats_keep_their_integers(tmp_path, name):
    weight = read(stored(tmp_path, name))

    assert isinstance(weight, GroupedWeight)
    assert weight.bits == GROUPED_FORMATS[name]
    assert int(weight.codes.max()) == 2**weight.bits - 1
    assert weight.scales.shape == weight.minimums.shape == (ROWS, COLUMNS // 32)


@pytest.mark.parametrize("name", ["F32", "Q4_1", "Q8_0", "Q6_K"])
def test_tensors_at_odd_places_are_read_too(tmp_path, name):
    entry = stored(tmp_path, name, offset=3)

    assert np.array_equal(read(entry).dense(torch.float32).numpy(), theirs(entry), equal_nan=True)


@pytest.mark.parametrize("name", ["F32", "Q4_1", "Q8_0", "Q6_K"])
def test_interleaved_heads_are_put_back_in_order(tmp_path, name):
    entry = stored(tmp_path, name, interleaved_heads=1)

    numbers = read(entry).dense(torch.float32).numpy()

    assert np.array_equal(numbers, theirs(entry)[[0, 2, 4, 1, 3, 5]], equal_nan=True)


@pytest.mark.parametrize("name", GROUPED_FORMATS)
def test_weights_of_one_format_are_stacked_without_loss(tmp_path, name):
    parts = [read(stored(tmp_path, name, seed)) for seed in (1, 2)]

    stacked = concatenate(parts)

    assert isinstance(stacked, GroupedWeight)
    expected = torch.cat([part.dense(torch.float32) for part in parts])
    assert torch.equal(stacked.dense(torch.float32), expected)


def test_fused_arithmetic_gives_the_same_numbers(tmp_path):
    for name in GROUPED_FORMATS:
        weight = read(stored(tmp_path, name))
        codes = weight.codes.view(ROWS, -1, 32).double()

        # In float64 both steps are exact here, so rounding once at the end is what a fused multiply
        # and add does.
        fused = codes * weight.scales.double()[..., None] + weight.minimums.double()[..., None]

        assert torch.equal(fused.float().view(ROWS, COLUMNS), weight.dense(torch.float32))


def test_plain_tensors_are_views_of_the_file(tmp_path):
    entry = stored(tmp_path, "F32")
    reader = Reader()

    first, second = reader.read(entry), reader.read(entry)

    assert first.values.data_ptr() == second.values.data_ptr()


def test_a_gguf_file_holds_the_weights_it_was_made_from(tmp_path):
    config = llama_config()
    weights = tiny_weights(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, weights=weights))
    reader = Reader()

    for name, numbers in weights.items():
        assert torch.equal(reader.read(checkpoint.entry(name)).dense(torch.float32), numbers)
