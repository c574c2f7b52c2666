"""Does a model in the published layout of DeepSeek V4 and V4.1 score like the numbers its files stand for?"""

from __future__ import annotations

import pytest
import torch

from tests.support.deepseek_files import (
    FP4,
    FP8,
    TABLE,
    V4,
    V41,
    deepseek_config,
    stored_tensors,
    write_tensors,
)
from tests.support.steps import ModelDriver, a_build, a_model
from tests.support.tiny_v4 import (
    golden_tokens,
    tiny_compressed_ids,
    v4_1_config,
    v4_config,
    weights_of,
)
from tokamak.checkpoint.load import load_model
from tokamak.checkpoint.source import open_checkpoint
from tokamak.models.registry import find

CONFIGS = {"V4": (v4_config(), V4), "V4.1": (v4_1_config(), V41)}


def loaded(folder):
    """The model of a folder, loaded as the engine loads it."""
    checkpoint = open_checkpoint(folder)
    model = find(checkpoint.architecture).from_config(checkpoint.config, a_build())
    load_model(model, checkpoint)
    return model


def scores(model):
    if hasattr(model, "take_compressed_ids"):
        model.take_compressed_ids(tiny_compressed_ids())
    tokens = [token % model.config.shared.vocab_tokens for token in golden_tokens()]
    driver = ModelDriver(model, block_tokens=8)
    return torch.cat([driver.step({"only": part})["only"] for part in (tokens[:50], tokens[50:])])


@pytest.mark.parametrize("layout", CONFIGS)
def test_a_published_layout_scores_like_its_numbers_to_the_bit(tmp_path, layout):
    config, block = CONFIGS[layout]
    weights = weights_of(config)
    tables = {name: value for name, value in weights.items() if not value.is_floating_point()}
    tensors, exact = stored_tensors(
        {name: value for name, value in weights.items() if name not in tables}, block
    )
    said = {**config, "quantization_config": deepseek_config(block)["quantization_config"]}
    folder = write_tensors(tmp_path, said, tensors | tables, shards=3)

    found = scores(loaded(folder))

    expected = scores(a_model(config, exact | tables))
    assert torch.equal(found, expected)
    rounded = [name for name in exact if not torch.equal(exact[name], weights[name])]
    assert all(any(kind.search(name) for name in rounded) for kind in (FP4, FP8))
    assert any(TABLE.search(name) for name in rounded) == (layout == "V4.1")
    assert (found - scores(a_model(config, weights))).abs().max() > 0.1
