"""Do models read from real files generate what the oracle, with its own reader, generates?"""

from __future__ import annotations

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from tests.support.oracle import Oracle
from tests.support.steps import ModelDriver, a_build
from tests.support.tiny import (
    llama_config,
    mistral_config,
    qwen3_config,
    qwen3_moe_config,
    write_checkpoint,
)
from tests.support.tiny_gguf import write_gguf
from tokamak.checkpoint.load import load_model
from tokamak.checkpoint.source import open_checkpoint
from tokamak.models.registry import find

PROMPT = [7, 300, 41, 5, 99, 250, 13, 77, 180, 4, 61]

BIASED = llama_config(attention_bias=True, mlp_bias=True)
F32, Q4_1, Q8_0 = (GGMLQuantizationType[name] for name in ("F32", "Q4_1", "Q8_0"))

WRITERS = {
    "llama-folder": lambda path: write_checkpoint(path, BIASED),
    "mistral-folder-bfloat16": lambda path: write_checkpoint(
        path, mistral_config(), dtype=torch.bfloat16
    ),
    "qwen3-folder-shards": lambda path: write_checkpoint(path, qwen3_config(), shards=3),
    "qwen3-moe-folder-shards": lambda path: write_checkpoint(path, qwen3_moe_config(), shards=3),
    "llama-gguf": lambda path: write_gguf(path / "tiny.gguf", BIASED),
    "llama-gguf-q4_1": lambda path: write_gguf(path / "tiny.gguf", llama_config(), format=Q4_1),
    "llama-gguf-q8_0-tied": lambda path: write_gguf(
        path / "tiny.gguf", llama_config(tie_word_embeddings=True), format=Q8_0
    ),
    "qwen3-gguf": lambda path: write_gguf(path / "tiny.gguf", qwen3_config()),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_loaded_model_generates_the_tokens_of_the_oracle(write, tmp_path):
    path = write(tmp_path)
    checkpoint = open_checkpoint(path)
    family = find(checkpoint.config["architectures"][0])
    model = family.from_config(checkpoint.config, a_build())

    load_model(model, checkpoint)

    expected = Oracle(path).generate(PROMPT, 24).token_ids
    assert ModelDriver(model).greedy("only", PROMPT, 24) == expected


@pytest.mark.parametrize("config", [BIASED, qwen3_config()], ids=["llama", "qwen3"])
def test_a_model_scores_the_same_from_a_folder_and_from_a_gguf_file(config, tmp_path):
    folder = Oracle(write_checkpoint(tmp_path / "folder", config))
    file = Oracle(write_gguf(tmp_path / "tiny.gguf", config))

    torch.testing.assert_close(file.scores(PROMPT), folder.scores(PROMPT))
