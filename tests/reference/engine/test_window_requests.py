"""Does a model whose every layer has a window get the oracle's tokens while it gives back what is out of sight?"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.oracle import Oracle
from tests.support.tiny import VOCAB_TOKENS, mistral_config, write_checkpoint
from tokamak.core.request import SamplingParams
from tokamak.llm import LLM

BLOCK = 4
RECORDED = {"graphs": "startup", "req_graph_sizes": (1, 2, 4), "token_graph_sizes": (16,)}


def ids(count: int, seed: int) -> list[int]:
    """Pseudo-random token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(20, VOCAB_TOKENS - 10, count).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "mistral", mistral_config())


@pytest.fixture
def llm(folder):
    made = LLM(
        str(folder),
        dtype="fp32",
        max_model_len=256,
        block_size=BLOCK,
        threads=1,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_blocks_override=66,
        **RECORDED,
    )
    yield made
    made.close()


def test_long_answers_beside_each_other_and_prefixes_in_common(folder, llm):
    oracle, prefix = Oracle(folder), ids(41, 7)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    prompts = [ids(30, 1), prefix + ids(5, 2), ids(3, 3), ids(50, 4)]

    first = llm.generate(prompts, params)
    second = llm.generate([prefix + ids(6, 5)], params)
    again = llm.generate([prompts[1]], params)

    # At their ends these four have 116 tokens each on average; all of them would be 116 blocks of the 65 there are.
    assert llm.stats().preemptions == 0
    for prompt, output in zip(
        [*prompts, prefix + ids(6, 5), prompts[1]], [*first, *second, *again], strict=True
    ):
        assert list(output.token_ids) == oracle.generate(prompt, 80).token_ids
    stats = llm.stats()
    assert stats.free_blocks == stats.total_blocks
