"""Do tables of n-grams on the host give the tokens of tables on the device, in the published layout?

`test_compressed_requests.py` runs every kind of step with tables in the mapped file, against the model alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.numbered import write_published_v4_1
from tests.support.tiny import VOCAB_TOKENS
from tokamak.core.request import SamplingParams
from tokamak.layers.table import Table
from tokamak.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SETTINGS = {
    "dtype": "fp32", "max_model_len": 64, "block_size": 8, "threads": 1, "num_blocks_override": 18,
    "max_num_seqs": 4, "max_num_batched_tokens": 16, "graphs": "startup", "req_graph_sizes": (4,), "token_graph_sizes": (16,),
}  # fmt: skip
"""Prompts are cut and steps recorded."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_published_v4_1(tmp_path_factory.mktemp("tiny") / "v4.1")


def prompts():
    """Of different lengths; the last begins like the first."""
    chance = np.random.default_rng(3)
    found = [chance.integers(20, VOCAB_TOKENS - 10, count).tolist() for count in (40, 9, 33, 17)]
    return [*found, found[0][:30] + found[1]]


def test_tables_of_the_host_give_the_tokens_of_tables_of_the_device(folder, monkeypatch):
    on_host, load = [], Table.load

    def seen(table, parts):
        on_host.append(table.on_host)
        load(table, parts)

    monkeypatch.setattr(Table, "load", seen)
    found = []
    for place in ("host", "device"):
        with LLM(str(folder), engram_tables=place, **SETTINGS) as llm:
            found.append([list(each.token_ids) for each in llm.generate(prompts(), GREEDY)])

    assert on_host == [True, False]
    assert found[0] == found[1]
