"""Do weights arrive whole, whatever their size beside the buffers', and in the number format they had?"""

from __future__ import annotations

import pytest
import torch

from tests.support.steps import ModelDriver, a_build
from tests.support.tiny import llama_config, write_checkpoint
from tokamak.checkpoint import load
from tokamak.checkpoint.load import load_model, load_random
from tokamak.checkpoint.source import open_checkpoint
from tokamak.checkpoint.upload import Uploader
from tokamak.core.weight import DenseWeight, GroupedWeight
from tokamak.models.registry import find

CPU = torch.device("cpu")
PROMPT = [5, 17, 99, 3, 250, 41, 7]


@pytest.mark.parametrize("numbers", [0, 1, 15, 16, 17, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_tensor_of_any_size_arrives_whole(numbers, dtype):
    uploader = Uploader(CPU, buffer_bytes=64)
    host = (torch.arange(numbers) % 251).to(dtype)

    found = uploader.tensor(host)

    assert torch.equal(found, host)
    assert found.dtype == dtype
    assert numbers == 0 or found.data_ptr() != host.data_ptr()


def test_a_view_with_gaps_arrives_in_its_own_order():
    host = torch.arange(60.0).view(6, 10)[:, ::2].T

    found = Uploader(CPU, buffer_bytes=32).tensor(host)

    assert torch.equal(found, host)
    assert found.is_contiguous()


def test_what_was_read_may_be_overwritten_afterwards():
    uploader, host = Uploader(CPU, buffer_bytes=16), torch.ones(11)

    found = uploader.tensor(host)
    host.zero_()

    assert found.tolist() == [1.0] * 11


def test_weights_keep_their_number_format():
    uploader = Uploader(CPU, buffer_bytes=64)
    dense = DenseWeight(torch.randn(3, 32).bfloat16())
    grouped = GroupedWeight(
        codes=torch.randint(0, 16, (3, 64), dtype=torch.uint8),
        scales=torch.rand(3, 2),
        minimums=torch.rand(3, 2),
        bits=4,
    )

    of_dense, of_grouped = uploader.weight(dense), uploader.weight(grouped)

    assert isinstance(of_dense, DenseWeight)
    assert isinstance(of_grouped, GroupedWeight)
    assert of_grouped.bits == 4
    assert torch.equal(of_dense.values, dense.values)
    assert torch.equal(of_grouped.dense(torch.float32), grouped.dense(torch.float32))


def test_a_model_loaded_through_buffers_is_the_model(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, llama_config(), shards=2))
    models = [find(checkpoint.architecture).from_config(checkpoint.config, a_build()) for _ in "ab"]
    load_model(models[0], checkpoint)
    # A device that is the CPU by another name: its weights go through the buffers.
    monkeypatch.setattr(load, "Uploader", lambda device: Uploader(CPU, buffer_bytes=1000))
    monkeypatch.setattr(load, "_end_loading", lambda device: None)

    load_model(models[1], checkpoint, torch.device("cuda", 0))

    first, second = (ModelDriver(model).step({"a": PROMPT})["a"] for model in models)
    assert torch.equal(first, second)


def test_random_weights_are_drawn_on_the_device_of_the_model(monkeypatch):
    asked, drawn = [], []
    a_generator = torch.Generator

    class Noted:
        part_shapes = ((3, 2),)

        def draw(self, generator):
            drawn.append(torch.randn(3, 2).device.type)
            return [DenseWeight(torch.randn(3, 2))]

        def load(self, parts):
            assert [part.shape for part in parts] == [(3, 2)]

    class One:
        def weights(self):
            return {"one": (Noted(), ("one",))}

        def optional_weights(self):
            return frozenset()

    def noted_generator(device):
        asked.append(device.type)
        return a_generator()

    monkeypatch.setattr(torch, "Generator", noted_generator)

    # A device without numbers stands for a GPU.
    report = load_random(One(), 7, torch.device("meta"))

    assert (asked, drawn) == (["meta"], ["meta"])
    assert report.parameters == 6
