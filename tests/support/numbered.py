"""How many tokens of the tiny tokenizer do n-gram memories tell apart, and which small V4.1 can be served with it?"""

from __future__ import annotations

from pathlib import Path

from tests.support.deepseek_files import V41, deepseek_config, stored_tensors, write_tensors
from tests.support.tiny import VOCAB_TOKENS, tiny_tokenizer, write_tokenizer
from tests.support.tiny_v4 import SMALL, v4_1_config, weights_of
from tokamak.errors import CheckpointError
from tokamak.models.deepseek_v4.compressed_ids import compressed_ids
from tokamak.text.tokenizer import Tokenizer


def numbered_tokens() -> int:
    """The count a config must state for the tiny tokenizer."""
    tokenizer = Tokenizer(tiny_tokenizer(), bos_id=None, eos_ids=())
    for expected in range(1, VOCAB_TOKENS + 1):
        try:
            compressed_ids(tokenizer, vocab_tokens=VOCAB_TOKENS, expected=expected)
        except CheckpointError:
            continue
        return expected
    raise AssertionError("no count of compressed ids fits")


def served_v4_1() -> dict[str, object]:
    """The config of a small V4.1 for the tiny tokenizer."""
    return v4_1_config(**SMALL, engram_compressed_vocab_size=numbered_tokens())


def write_published_v4_1(folder: Path) -> Path:
    """That model with its tokenizer, in the number formats and the layout it is published in."""
    config = served_v4_1()
    tensors, _ = stored_tensors(weights_of(config), V41)
    said = {**config, "quantization_config": deepseek_config(V41)["quantization_config"]}
    write_tensors(folder, said, tensors)
    write_tokenizer(folder)
    return folder
