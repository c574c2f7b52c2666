"""Does V4 compute what transformers computes, whole, in parts and in its cached decode?"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from tests.support.steps import ModelDriver, a_build, a_model
from tests.support.tiny_v4 import v4_config, weights_of
from tokamak.checkpoint.load import load_model
from tokamak.checkpoint.source import open_checkpoint
from tokamak.models.deepseek_v4.v4 import DeepseekV4
from tokamak.models.deepseek_v4.weights import as_in_transformers

CLOSE = 3e-5
PROMPT = 29


def their_model(config, weights):
    """transformers' model, with our published names put into its own."""
    names = ("architectures", "model_type", "compress_ratios", "rope_scaling", "torch_dtype")
    given = {name: value for name, value in config.items() if name not in names}
    types = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        8: "heavily_compressed_attention",
    }
    given["layer_types"] = [types[ratio] for ratio in config["compress_ratios"][:5]]
    given["compress_rates"] = {types[4]: 4, types[8]: 8}
    theirs = DeepseekV4Config(
        **given, rope_parameters=dict(config["rope_scaling"]), attn_implementation="eager"
    )
    model = DeepseekV4ForCausalLM(theirs).eval()
    ours = DeepseekV4.from_config(config, a_build())
    published = {own: names for own, (_, names) in ours.weights().items()}
    state = {}
    for own, (_, names) in as_in_transformers(ours.weights(), 6).items():
        parts = [weights[name] for name in published[own]]
        if len(names) == len(parts):
            state |= dict(zip(names, parts, strict=True))
        elif "gate_up" in names[0]:
            pairs = [torch.cat(parts[at : at + 2]) for at in range(0, len(parts), 2)]
            state[names[0]] = torch.stack(pairs)
        else:
            state[names[0]] = torch.stack(parts)
    model.load_state_dict(state, strict=True)
    return model


@pytest.fixture(scope="module")
def case():
    """A config, its weights, tokens, transformers' model and its scores in one pass."""
    config = v4_config()
    weights = weights_of(config)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 320, (70,), generator=generator).tolist()
    theirs = their_model(config, weights)
    with torch.inference_mode():
        scores = theirs(torch.tensor([tokens]), use_cache=False).logits[0]
    return config, weights, tokens, theirs, scores


def test_a_whole_text_scores_like_transformers(case):
    config, weights, tokens, _, expected = case
    driver = ModelDriver(a_model(config, weights), block_tokens=8)

    scores = driver.step({"only": tokens})["only"]

    torch.testing.assert_close(scores, expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("block_tokens", [8, 32])
def test_a_text_in_parts_scores_like_one_in_a_pass(case, block_tokens):
    config, weights, tokens, _, expected = case
    driver = ModelDriver(a_model(config, weights), block_tokens=block_tokens)

    parts = [tokens[:13], tokens[13:PROMPT]] + [[token] for token in tokens[PROMPT:]]
    scores = torch.cat([driver.step({"only": part})["only"] for part in parts])

    torch.testing.assert_close(scores, expected, rtol=CLOSE, atol=CLOSE)


def test_decode_scores_like_the_cached_decode_of_transformers(case):
    config, weights, tokens, theirs, _ = case
    driver = ModelDriver(a_model(config, weights), block_tokens=8)
    driver.step({"only": tokens[:PROMPT]})
    with torch.inference_mode():
        cache = theirs(torch.tensor([tokens[:PROMPT]]), use_cache=True)["past_key_values"]

        for token in tokens[PROMPT : PROMPT + 12]:
            scores = driver.step({"only": [token]})["only"]
            expected = theirs(torch.tensor([[token]]), cache=cache).logits[0]
            torch.testing.assert_close(scores, expected, rtol=CLOSE, atol=CLOSE)


def test_ragged_requests_in_mixed_steps_score_like_each_alone(case):
    config, weights, tokens, _, expected = case
    driver = ModelDriver(a_model(config, weights), block_tokens=8)

    driver.step({"a": tokens[:5], "b": tokens[:18]})
    mixed = driver.step({"a": tokens[5:14], "b": tokens[18:19]}, padding=3)
    decoded = driver.step({"a": tokens[14:15], "b": tokens[19:20]}, padding=2)

    for rows, found in (
        (slice(5, 14), mixed["a"]),
        (slice(18, 19), mixed["b"]),
        (slice(14, 15), decoded["a"]),
        (slice(19, 20), decoded["b"]),
    ):
        torch.testing.assert_close(found, expected[rows], rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("spelling", ["published", "transformers"])
def test_a_checkpoint_loads_by_either_spelling(case, tmp_path, spelling):
    config, weights, tokens, theirs, expected = case
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = weights if spelling == "published" else theirs.state_dict()
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = DeepseekV4.from_config(config, a_build())

    report = load_model(model, open_checkpoint(tmp_path))

    scores = ModelDriver(model, block_tokens=8).step({"only": tokens[:20]})["only"]
    assert not report.unused
    torch.testing.assert_close(scores, expected[:20], rtol=CLOSE, atol=CLOSE)
