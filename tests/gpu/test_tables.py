"""Does a GPU read tables of n-grams in the host's pinned memory: right rows, without a wait, recorded or not?"""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.device import no_host_wait
from tests.support.numbered import write_published_v4_1
from tests.support.steps import a_build
from tests.support.tiny import VOCAB_TOKENS
from tokamak.config.places import CACHE_VARIABLE
from tokamak.core.request import SamplingParams
from tokamak.core.weight import DenseWeight
from tokamak.device.facts import device_facts
from tokamak.graphs.streams import SideStreams
from tokamak.layers import table as tables
from tokamak.layers.table import Table
from tokamak.llm import LLM
from tokamak.ops.load import load_backends
from tokamak.quant.weights import fp8_weight

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch.cuda.is_available() is False"),
]
GPU = torch.device("cuda", 0)
TABLE_ROWS, WIDTH = 5000, 256
READ_ROWS = 6000
"""More than the programs that read the host take at once."""


def numbers():
    return torch.randn(TABLE_ROWS, WIDTH, generator=torch.Generator().manual_seed(5))


WEIGHTS = {
    "published": lambda: fp8_weight(numbers(), (1, 32)),
    "a scale a row": lambda: fp8_weight(numbers(), (1, WIDTH), powers_of_two=False),
    "float32": lambda: DenseWeight(numbers()),
    "bfloat16": lambda: DenseWeight(numbers().bfloat16()),
}


def a_table(weight):
    load_backends()
    build = replace(
        a_build(torch.bfloat16), device=GPU, facts=device_facts("cuda"), host_tables=True
    )
    table = Table(build, TABLE_ROWS, WIDTH)
    table.load([weight])
    return table


def some_rows(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TABLE_ROWS, (READ_ROWS,), generator=generator)


@pytest.mark.parametrize("kind", WEIGHTS)
@torch.inference_mode()
def test_rows_of_pinned_memory_are_those_of_the_table(kind):
    weight = WEIGHTS[kind]()
    table, rows = a_table(weight), some_rows(1)
    assert table._codes.is_pinned()
    places, out = rows.to(GPU), torch.empty((READ_ROWS, WIDTH), dtype=torch.bfloat16, device=GPU)
    table.read(places, out.clone())
    used = torch.cuda.memory_allocated()

    with no_host_wait():
        table.read(places, out)

    assert torch.cuda.memory_allocated() == used
    assert torch.equal(out.cpu(), weight.dense(torch.bfloat16)[rows])


@torch.inference_mode()
def test_a_recorded_fork_reads_the_rows_of_each_replay():
    weight = WEIGHTS["published"]()
    table, streams, rows = a_table(weight), SideStreams(GPU), some_rows(1).to(GPU)
    out = torch.empty((READ_ROWS, WIDTH), dtype=torch.bfloat16, device=GPU)

    def forward():
        with streams.fork("engram"):
            table.read(rows, out)
        busy = torch.ones((512, 512), device=GPU) @ torch.ones((512, 512), device=GPU)
        streams.join("engram")
        return out + busy[0, 0] * 0

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward()
    for seed in (2, 3):
        rows.copy_(some_rows(seed))
        graph.replay()
        assert torch.equal(found.cpu(), weight.dense(torch.bfloat16)[some_rows(seed)])


def test_a_random_table_larger_than_what_is_drawn_fills_pinned_memory(monkeypatch):
    monkeypatch.setattr(tables, "DRAWN_ROWS", 512)
    table = a_table(fp8_weight(numbers()[:512], (1, 32)))

    codes = table._codes.view(torch.uint8)

    assert codes.is_pinned()
    assert torch.equal(codes[512:1024], codes[:512])
    assert torch.equal(codes[4608:], codes[: TABLE_ROWS - 4608])


def test_memory_is_given_back_with_the_table():
    table = a_table(WEIGHTS["published"]())
    address = table._codes.data_ptr()
    torch.cuda.synchronize()

    del table
    gc.collect()

    again = a_table(WEIGHTS["published"]())
    assert again._codes.is_pinned(), f"the mapping at {address:#x} was pinned once"


@pytest.mark.parametrize("graphs", ["startup", "off"])
def test_an_engine_with_tables_on_the_host_gives_the_tokens_of_one_with_them_on_the_gpu(
    tmp_path, monkeypatch, graphs
):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    folder = write_published_v4_1(tmp_path / "v4.1")
    chance = np.random.default_rng(3)
    prompts = [chance.integers(20, VOCAB_TOKENS - 10, count).tolist() for count in (40, 9, 33)]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    found = []
    for place in ("host", "device"):
        with LLM(
            str(folder), device="cuda", engram_tables=place, max_model_len=64, block_size=8,
            num_blocks_override=40, max_num_seqs=4, max_num_batched_tokens=32, graphs=graphs,
        ) as llm:  # fmt: skip
            found.append([list(each.token_ids) for each in llm.generate(prompts, greedy)])

    assert found[0] == found[1]
