"""Do DeepSeek V4 and V4.1 give a GPU the tokens that a CPU gives them, recorded or not?

The whole engine on tiny models: in float32 against the model run alone on the CPU, and in the formats they are
published in, recordings against the eager forward.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.numbered import served_v4_1, write_published_v4_1
from tests.support.steps import ModelDriver, a_build, a_model
from tests.support.tiny import VOCAB_TOKENS, tiny_tokenizer, write_checkpoint
from tests.support.tiny_v4 import v4_config, weights_of
from tokamak.config.places import CACHE_VARIABLE
from tokamak.core.request import SamplingParams
from tokamak.llm import LLM
from tokamak.text.tokenizer import Tokenizer

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch.cuda.is_available() is False"),
]

DEVICE = "cuda"
BLOCK = 8
CLEAR = 0.05
"""Scores this far apart are not confused by another order of additions, nor by a cached number that it rounds otherwise."""

CONFIGS = {
    "v4": v4_config(),
    "v4.1": served_v4_1(),
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 33, 60)


@pytest.fixture(autouse=True)
def _kept_here(tmp_path, monkeypatch):
    """What recordings take is kept for one test."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    config = CONFIGS[request.param]
    place = tmp_path_factory.mktemp("tiny") / request.param
    return write_checkpoint(place, config, weights=weights_of(config))


def ids(count: int) -> list[int]:
    """Pseudo-random token ids, the same for the same count."""
    return np.random.default_rng(count).integers(20, VOCAB_TOKENS - 10, count).tolist()


def an_llm(folder, **options):
    settings = {
        "device": DEVICE,
        "max_model_len": 128,
        "block_size": BLOCK,
        "num_blocks_override": 70,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
    }
    return LLM(str(folder), **{**settings, **options})


def tokens_of(folder, prompts, **options):
    with an_llm(folder, **options) as llm:
        return [list(each.token_ids) for each in llm.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def model(folder):
    """The model alone on the CPU."""
    config = CONFIGS[folder.name]
    found = a_model(config, weights_of(config), a_build())
    found.take_tokenizer(Tokenizer(tiny_tokenizer(), bos_id=None, eos_ids=()))
    return found


def short_of_best(model, prompt, found):
    """By how much each token found scores less than the best one behind what was found before it."""
    scores = ModelDriver(model, block_tokens=BLOCK).step({"alone": prompt + found[:-1]})["alone"]
    scores = scores[len(prompt) - 1 :]
    return scores.amax(dim=1) - scores.gather(1, torch.tensor(found).unsqueeze(1))[:, 0]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"graphs": "startup", "verify_graphs": True}, id="recorded"),
        pytest.param({"graphs": "serving"}, id="recorded while serving"),
        pytest.param({"graphs": "off"}, id="eager"),
        pytest.param({"graphs": "off", "max_num_batched_tokens": 16}, id="small chunks"),
    ],
)
def test_tokens_are_those_of_the_model_alone_on_a_cpu(folder, model, options):
    prompts = [ids(length) for length in LENGTHS]

    found = tokens_of(folder, prompts, dtype="float32", **options)

    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == GREEDY.max_tokens
        assert short_of_best(model, prompt, tokens).max() < CLEAR, len(prompt)


@pytest.mark.parametrize("cache_dtype", ["auto", "native"])
def test_recordings_of_published_formats_do_what_the_eager_forward_does(tmp_path, cache_dtype):
    """A start that verifies its recordings ends where one of them differs."""
    folder = write_published_v4_1(tmp_path / "v4.1")
    prompts = [ids(length) for length in LENGTHS]
    options = {"dtype": "bfloat16", "kv_cache_dtype": cache_dtype}

    recorded = tokens_of(folder, prompts, graphs="startup", verify_graphs=True, **options)
    again = tokens_of(folder, prompts, graphs="startup", **options)

    assert recorded == again
