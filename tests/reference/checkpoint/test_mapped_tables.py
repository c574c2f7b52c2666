"""Does a table of n-grams stay in its file, however large that is, and is one of another size refused?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.deepseek_files import V41, deepseek_config, stored_tensors, write_tensors
from tests.support.steps import a_build
from tests.support.tiny import write_json
from tests.support.tiny_v4 import SMALL, v4_1_config, weights_of
from tokamak.checkpoint.load import load_model
from tokamak.checkpoint.read import Reader
from tokamak.checkpoint.source import open_checkpoint
from tokamak.errors import CheckpointError
from tokamak.layers.table import Table
from tokamak.models.deepseek_v4.v4_1 import DeepseekV41

NAME = "layers.1.engram.embed"
WIDTH, GROUPS = 256, 8
HOST = replace(a_build(), host_tables=True)


def mapped_file(address: int) -> str:
    """The file that is mapped where an address lies, or nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, *rest = line.split(maxsplit=5)
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        if first <= address < last:
            return Path(rest[4]).name if len(rest) == 5 else ""
    return ""


def write_large(folder: Path, rows: int) -> Path:
    """A table in the published format that is a hole in its file, but for ones in its last row."""
    codes, scales = rows * WIDTH, rows * GROUPS
    header = json.dumps(
        {
            f"{NAME}.weight": {"dtype": "F8_E4M3", "shape": [rows, WIDTH], "data_offsets": [0, codes]},
            f"{NAME}.scale": {
                "dtype": "F8_E8M0", "shape": [rows, GROUPS], "data_offsets": [codes, codes + scales],
            },
        }
    ).encode()  # fmt: skip
    write_json(folder / "config.json", deepseek_config(V41))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start = file.tell()
        file.truncate(start + codes + scales)
        file.seek(start + codes - WIDTH)
        file.write(bytes([0x38]) * WIDTH)
        file.seek(start + codes + scales - GROUPS)
        file.write(bytes(range(127, 127 + GROUPS)))
    return folder


def test_a_table_larger_than_the_memory_is_read_row_by_row(tmp_path):
    rows = 2 * psutil.virtual_memory().total // WIDTH
    entry = open_checkpoint(write_large(tmp_path, rows)).entry(f"{NAME}.weight")
    table, process = Table(HOST, rows, WIDTH), psutil.Process()
    before = process.memory_info().rss

    table.load([Reader().read(entry)])
    found = torch.empty((3, WIDTH))
    table.read(torch.tensor([rows - 1, 0, rows // 2]), found)

    powers = torch.arange(GROUPS).exp2().repeat_interleave(WIDTH // GROUPS)
    assert torch.equal(found[0], powers)
    # A scale of zero bits is 2^-127, the code zero is zero.
    assert not found[1:].any()
    assert process.memory_info().rss - before < 32 * 1024**2


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A tiny V4.1 in the published layout."""
    config = v4_1_config(**SMALL)
    tensors, _ = stored_tensors(weights_of(config), V41)
    said = {**config, "quantization_config": deepseek_config(V41)["quantization_config"]}
    return said, tensors, write_tensors(tmp_path_factory.mktemp("v4.1") / "right", said, tensors)


def loaded(folder, *, host):
    checkpoint = open_checkpoint(folder)
    model = DeepseekV41.from_config(checkpoint.config, replace(a_build(), host_tables=host))
    load_model(model, checkpoint)
    return model


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_a_table_on_the_host_is_the_mapped_file_and_another_a_copy(written, host):
    (engram,) = loaded(written[2], host=host)._engrams

    for numbers in (engram.table._codes, engram.table._scales):
        assert mapped_file(numbers.data_ptr()).endswith(".safetensors") == host


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_a_table_of_another_size_is_refused_by_name_before_anything_is_read(
    written, tmp_path, monkeypatch, host
):
    said, tensors, _ = written
    cut = {name: value[:-1].clone() if NAME in name else value for name, value in tensors.items()}
    folder = write_tensors(tmp_path, said, cut)
    monkeypatch.setattr(Reader, "read", None)

    with pytest.raises(
        CheckpointError, match=rf"{NAME}\.weight .* has shape \[659, 32\]; .*\[660, 32"
    ):
        loaded(folder, host=host)
