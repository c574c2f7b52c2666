"""Does the real SmolLM2 file open as what it is, and tokenise as llama.cpp does?

The ids were made with llama.cpp from the same file (`data/smollm2_tokens.json`), the prompts with
transformers (`tests/e2e/data/smollm2_greedy.json`).
"""

import hashlib
import json
import pydoc_data.topics
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.support.vocabularies import SPLIT_CHARACTERS
from tokamak.checkpoint.fetch import resolve_model
from tokamak.checkpoint.read import Reader
from tokamak.checkpoint.source import open_checkpoint
from tokamak.checkpoint.tokenizer import load_chat_template, load_tokenizer
from tokamak.text.detokenizer import REPLACEMENT, Detokenizer

pytestmark = [pytest.mark.weights]

TESTS = Path(__file__).parents[2]

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_tokens.json").read_text("utf-8"))

CASES = json.loads((TESTS / "e2e" / "data" / "smollm2_greedy.json").read_text("utf-8"))["cases"]


@pytest.fixture(scope="module")
def path():
    return resolve_model("smollm2-135m", progress=False)


@pytest.fixture(scope="module")
def tokenizer(path):
    return load_tokenizer(path)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


@pytest.mark.parametrize(("text", "ids"), GOLDEN["texts"])
def test_short_texts_have_the_ids_of_llama_cpp(tokenizer, text, ids):
    assert tokenizer.encode(text, add_special_tokens=True) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_help_topics_have_the_ids_of_llama_cpp(tokenizer):
    """Topics differ between versions of Python; those recorded are compared wherever they occur."""
    found = {}
    for text in pydoc_data.topics.topics.values():
        ids = tokenizer.encode(text, add_special_tokens=False)
        found[digest(text.encode())] = digest(struct.pack(f"<{len(ids)}I", *ids))

    known = found.keys() & GOLDEN["topics"].keys()

    assert known
    assert {t: found[t] for t in known} == {t: GOLDEN["topics"][t] for t in known}


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_messages_become_the_recorded_prompt_and_its_ids(path, tokenizer, case):
    prompt = load_chat_template(path, None).render(case["messages"])

    assert prompt == case["prompt"]
    assert tokenizer.encode(prompt, add_special_tokens=False) == case["prompt_ids"]


def test_two_tokens_end_a_text_and_none_begins_it(tokenizer):
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.bos_id == 1
    assert len(tokenizer.special_ids) == 17
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode(
        "a", add_special_tokens=False
    )


def test_every_cut_of_split_characters_joins_to_its_whole(tokenizer):
    ids = tokenizer.encode(SPLIT_CHARACTERS, add_special_tokens=False)

    for max_tokens in range(1, len(ids) + 1):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, prompt_ids=[1, 520, 198])
        deltas = [detokenizer.feed([i]) for i in ids[:max_tokens]]
        rest = detokenizer.finish()

        assert "".join(deltas) + rest == tokenizer.decode(
            ids[:max_tokens], skip_special_tokens=True
        )
        assert REPLACEMENT not in "".join(deltas)
        assert rest.rstrip(REPLACEMENT).strip(" ") == ""


def test_the_bytes_of_tokens_joined_are_the_text(tokenizer):
    ids = tokenizer.encode(SPLIT_CHARACTERS, add_special_tokens=False)

    assert b"".join(tokenizer.token_bytes(i) for i in ids) == SPLIT_CHARACTERS.encode()


def test_the_file_is_what_its_metadata_says(path):
    checkpoint = open_checkpoint(path)

    facts = checkpoint.facts()

    assert len(checkpoint.names()) == 272
    assert (facts.architecture, facts.vocab_tokens) == ("LlamaForCausalLM", 49152)
    assert (facts.max_position_tokens, facts.stored_dtype) == (8192, "Q4_1")
    assert facts.parameters == 134_515_008
    assert checkpoint.config["tie_word_embeddings"] is True


def test_weights_of_one_layer_and_the_embedding_are_those_the_gguf_package_reads(path):
    checkpoint, reader = open_checkpoint(path), Reader()
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    chosen = [name for name in checkpoint.names() if ".layers." not in name or ".layers.7." in name]
    assert len(chosen) == 2 + 9
    for name in chosen:
        entry = checkpoint.entry(name)
        numbers = reader.read(entry).dense(torch.float32).numpy()
        stored = theirs[entry.stored_name]
        expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
        if entry.interleaved_heads:
            pairs = expected.reshape(entry.interleaved_heads, -1, 2, expected.shape[1])
            expected = pairs.swapaxes(1, 2).reshape(expected.shape)

        assert np.array_equal(numbers, expected), name
