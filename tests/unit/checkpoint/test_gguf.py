"""Is a GGUF file read as written, and every way of being damaged told apart from a good one?"""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from tokamak.checkpoint.gguf import FORMATS, GgufFile
from tokamak.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError


def a_file(folder: Path, *, values=(), tensors=()) -> Path:
    """A file with metadata (name, value) pairs and float32 tensors (name, array)."""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values:
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    for name, array in tensors:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ONE_TENSOR = (("output.weight", np.arange(12, dtype=np.float32).reshape(3, 4)),)


def test_metadata_comes_back_by_type(tmp_path):
    values = [("a", 7), ("b", 0.5), ("c", "text"), ("d", True), ("e", ["x", "ž"]), ("f", [1, -2])]

    file = GgufFile(a_file(tmp_path, values=values, tensors=ONE_TENSOR))

    assert (file.get("a", int), file.get("b", float), file.get("c", str)) == (7, 0.5, "text")
    assert file.get("d", bool) is True
    assert file.strings("e") == ["x", "ž"]
    assert file.numbers("f") == [1, -2]


def test_tensors_have_rows_first_and_bytes_in_place(tmp_path):
    file = GgufFile(a_file(tmp_path, tensors=ONE_TENSOR))

    tensor = file.tensors["output.weight"]

    assert (tensor.shape, tensor.format.name) == ((3, 4), "F32")
    assert file.tensor_bytes(tensor) == ONE_TENSOR[0][1].tobytes()


def test_formats_are_those_of_the_gguf_package():
    sizes = gguf.constants.GGML_QUANT_SIZES
    theirs = {int(kind): (kind.name, *size) for kind, size in sizes.items()}

    ours = {n: (f.name, f.block_numbers, f.block_bytes) for n, f in FORMATS.items()}

    assert ours == {n: theirs[n] for n in ours}


def test_every_cut_of_a_file_is_refused_as_truncated(tmp_path):
    values = [("tokens", ["one", "two"]), ("numbers", [1, 2, 3]), ("name", "tiny")]
    whole = a_file(tmp_path, values=values, tensors=ONE_TENSOR).read_bytes()
    end = GgufFile(tmp_path / "model.gguf").tensors["output.weight"].offset + 48
    cut = tmp_path / "cut.gguf"

    for length in range(4, end):
        cut.write_bytes(whole[:length])

        with pytest.raises(CheckpointError, match=r"cut\.gguf") as refusal:
            GgufFile(cut)

        assert str(length) in refusal.value.message


def test_a_truncated_file_names_the_tensor_and_the_bytes_it_needs(tmp_path):
    path = a_file(tmp_path, tensors=ONE_TENSOR)
    tensor = GgufFile(path).tensors["output.weight"]
    path.write_bytes(path.read_bytes()[: tensor.offset + 40])

    with pytest.raises(CheckpointError, match=r"output.weight") as refusal:
        GgufFile(path)

    assert f"{tensor.offset} to {tensor.offset + 48}" in refusal.value.message


@pytest.mark.parametrize(
    ("at", "value", "error", "says"),
    [
        (0, b"GGML", CheckpointError, "begins with"),
        (4, struct.pack("<I", 1), UnsupportedModelError, "version 1"),
        (4, struct.pack(">I", 3), UnsupportedModelError, "big-endian"),
        (8, struct.pack("<Q", 2**60), CheckpointError, "truncated|dimensions"),
        (16, struct.pack("<Q", 2**60), CheckpointError, "truncated|type"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, at, value, error, says):
    path = a_file(tmp_path, tensors=ONE_TENSOR)
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data)

    with pytest.raises(error, match=says):
        GgufFile(path)


def test_an_unknown_number_format_is_named(tmp_path):
    path = a_file(tmp_path, tensors=ONE_TENSOR)
    data = path.read_bytes()
    row = b"output.weight" + struct.pack("<IQQI", 2, 4, 3, 0)
    assert data.count(row) == 1
    path.write_bytes(data.replace(row, row[:-4] + struct.pack("<I", 999)))

    with pytest.raises(UnsupportedModelError, match=r"output.weight .* 999"):
        GgufFile(path)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path):
    path = a_file(tmp_path, tensors=ONE_TENSOR)
    row = b"output.weight" + struct.pack("<IQQI", 2, 4, 3, 0)
    path.write_bytes(path.read_bytes().replace(row, row[:-4] + struct.pack("<I", 3)))

    with pytest.raises(CheckpointError, match="whole Q4_1 blocks"):
        GgufFile(path)


def test_a_value_of_another_type_is_refused_by_its_name(tmp_path):
    file = GgufFile(a_file(tmp_path, values=[("a", "seven"), ("b", 1)], tensors=ONE_TENSOR))

    with pytest.raises(CheckpointError, match=r"a of .* is 'seven'; expected int"):
        file.get("a", int)
    with pytest.raises(CheckpointError, match="no list of strings b"):
        file.strings("b")
    with pytest.raises(CheckpointError, match="no list of numbers c"):
        file.numbers("c")


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no file"):
        GgufFile(tmp_path / "none.gguf")


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "empty.gguf"
    path.touch()

    with pytest.raises(CheckpointError, match="0 bytes"):
        GgufFile(path)
