"""Are damaged or contradicting safetensors folders refused, with the file and tensor named? (OPEN-18)"""

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import save_file

from tokamak.checkpoint.safetensors import INDEX, find_tensors, read_header
from tokamak.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def an_array(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.fixture
def folder(tmp_path):
    """Two shards with two tensors each, and their index."""
    places = {}
    for file, names in ((FIRST, ("a", "b")), (SECOND, ("c", "d"))):
        save_file({name: an_array(4, 8) for name in names}, tmp_path / file)
        places |= dict.fromkeys(names, file)
    write_index(tmp_path, places)
    return tmp_path


def write_index(folder, places):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def places_of(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_tensors_of_all_shards_are_found_with_their_places(folder):
    found = find_tensors(folder)

    assert sorted(found) == ["a", "b", "c", "d"]
    assert (found["d"].file.name, found["d"].shape, found["d"].format.name) == (
        SECOND,
        (4, 8),
        "F32",
    )
    stored = found["d"].file.read_bytes()[found["d"].offset :][: found["d"].nbytes]
    assert stored == an_array(4, 8).tobytes()


def test_a_missing_shard_is_named_with_a_tensor_of_it(folder):
    (folder / SECOND).unlink()

    with pytest.raises(CheckpointError, match=rf"{SECOND}, which is missing.*such as c"):
        find_tensors(folder)


def test_an_index_that_sends_a_tensor_to_the_wrong_shard_is_refused(folder):
    write_index(folder, places_of(folder) | {"d": FIRST})

    with pytest.raises(CheckpointError, match=f"puts tensor d in {FIRST}; it is in {SECOND}"):
        find_tensors(folder)


def test_an_index_entry_that_no_shard_holds_is_refused(folder):
    write_index(folder, places_of(folder) | {"e": SECOND})

    with pytest.raises(CheckpointError, match=f"puts tensor e in {SECOND}, which does not hold it"):
        find_tensors(folder)


def test_a_tensor_that_is_not_in_the_index_is_refused(folder):
    places = places_of(folder)
    del places["d"]
    write_index(folder, places)

    with pytest.raises(CheckpointError, match=f"tensor d of {SECOND} is not in"):
        find_tensors(folder)


def test_an_extra_shard_is_one_warning(folder, caplog):
    save_file({"z": an_array(2, 2)}, folder / "consolidated.safetensors")
    save_file({"y": an_array(2, 2)}, folder / "other.safetensors")

    with caplog.at_level(logging.WARNING):
        found = find_tensors(folder)

    assert sorted(found) == ["a", "b", "c", "d"]
    assert len(caplog.records) == 1
    assert "consolidated.safetensors" in caplog.text


def test_a_tensor_in_two_shards_is_refused(folder):
    save_file({"c": an_array(4, 8), "d": an_array(4, 8), "a": an_array(4, 8)}, folder / SECOND)

    with pytest.raises(CheckpointError, match="tensor a is in two files"):
        find_tensors(folder)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": an_array(4, 8), "b": an_array(2)}, path)
    whole = path.read_bytes()

    for length in range(len(whole)):
        path.write_bytes(whole[:length])

        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            find_tensors(tmp_path)


def test_bytes_after_the_last_tensor_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": an_array(4)}, path)
    path.write_bytes(path.read_bytes() + b"more")

    with pytest.raises(CheckpointError, match="its tensors end at byte"):
        find_tensors(tmp_path)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "takes 8"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "begins at byte"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "shape"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, "data_offsets"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "data_offsets"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[1]", "no JSON object"),
        (b"{", "no valid JSON"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(tmp_path, header, says):
    path = tmp_path / "model.safetensors"
    write_raw(path, header, bytes(8))

    with pytest.raises(CheckpointError, match=says):
        find_tensors(tmp_path)


def test_a_dtype_nobody_knows_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    write_raw(path, {"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))

    with pytest.raises(UnsupportedModelError, match=r"tensor a .* 'F3'"):
        list(read_header(path))


def test_several_files_need_an_index(folder):
    (folder / INDEX).unlink()

    with pytest.raises(CheckpointError, match=r"which tensor is where|no model.safetensors.index"):
        find_tensors(folder)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_name_files_outside_the_folder(folder, shard):
    write_index(folder, {"a": shard})

    with pytest.raises(CheckpointError, match="expected a file name"):
        find_tensors(folder)


def test_weights_that_can_run_code_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")

    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin"):
        find_tensors(tmp_path)


def test_a_folder_without_weights_has_no_tensors(tmp_path):
    assert find_tensors(tmp_path) == {}


def test_a_file_that_is_missing_is_not_found(tmp_path):
    with pytest.raises(ModelNotFoundError):
        list(read_header(tmp_path / "none.safetensors"))
