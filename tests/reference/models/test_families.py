"""Do our decoders compute what transformers computes, however the work is cut into steps?"""

from __future__ import annotations

import pytest
import torch

from tests.support.steps import ModelDriver, a_build, a_model
from tests.support.theirs import their_scores
from tests.support.tiny import (
    llama_config,
    mistral_config,
    qwen3_config,
    qwen3_moe_config,
    tiny_weights,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

CONFIGS = {
    "llama": llama_config(),
    "llama-tied": llama_config(tie_word_embeddings=True),
    "llama-biased": llama_config(attention_bias=True, mlp_bias=True),
    "llama-one-key-head": llama_config(num_key_value_heads=1),
    "llama-every-head-its-own-key": llama_config(num_key_value_heads=4),
    "llama-narrow-heads": llama_config(head_dim=8),
    "llama-linear-rope": llama_config(rope_scaling={"type": "linear", "factor": 4.0}),
    "llama-llama3-rope": llama_config(rope_scaling=LLAMA3),
    "llama-yarn-rope": llama_config(rope_scaling=YARN),
    "llama-new-rope-spelling": llama_config(rope_parameters={**LLAMA3, "rope_theta": 500000.0}),
    "mistral": mistral_config(),
    "mistral-no-window": mistral_config(sliding_window=None),
    "qwen3": qwen3_config(),
    "qwen3-untied": qwen3_config(tie_word_embeddings=False),
    "qwen3-biased": qwen3_config(attention_bias=True),
    "qwen3-window-in-one-layer": qwen3_config(
        use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3-moe": qwen3_moe_config(),
    "qwen3-moe-shares-of-all": qwen3_moe_config(norm_topk_prob=False, num_experts_per_tok=3),
    "qwen3-moe-dense-first": qwen3_moe_config(mlp_only_layers=[0]),
    "qwen3-moe-every-second": qwen3_moe_config(decoder_sparse_step=2, attention_bias=True),
    "qwen3-moe-windows": qwen3_moe_config(
        use_sliding_window=True, sliding_window=6, tie_word_embeddings=True
    ),
}

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def a_prompt(tokens, seed):
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 320, (tokens,), generator=generator).tolist()


@pytest.fixture(params=CONFIGS, scope="module")
def case(request):
    """A config, its weights, three prompts and their scores by transformers."""
    config = CONFIGS[request.param]
    weights = tiny_weights(config)
    prompts = [a_prompt(tokens, seed) for seed, tokens in enumerate((41, 17, 6))]
    return config, weights, prompts, their_scores(config, weights, prompts)


def test_a_whole_prompt_scores_like_transformers(case):
    config, weights, prompts, expected = case
    driver = ModelDriver(a_model(config, weights))

    scores = driver.step({"only": prompts[0]})

    torch.testing.assert_close(scores["only"], expected[0], **TOLERANCE)


def test_a_prompt_in_chunks_scores_like_transformers(case):
    config, weights, prompts, expected = case
    driver = ModelDriver(a_model(config, weights))

    parts = [prompts[0][at : at + 7] for at in range(0, len(prompts[0]), 7)]
    scores = torch.cat([driver.step({"only": part})["only"] for part in parts])

    torch.testing.assert_close(scores, expected[0], **TOLERANCE)


def test_ragged_requests_in_mixed_steps_score_like_transformers(case):
    config, weights, prompts, expected = case
    driver = ModelDriver(a_model(config, weights))
    scores = {0: [], 1: [], 2: []}

    # Each request joins one step later than the one before, prefills five tokens, then decodes.
    at = [0, 0, 0]
    for turn in range(50):
        work = {}
        for index, prompt in enumerate(prompts):
            if turn >= index and at[index] < len(prompt):
                taken = 5 if at[index] == 0 else 1
                work[str(index)] = prompt[at[index] : at[index] + taken]
                at[index] += taken
        for name, rows in (driver.step(work) if work else {}).items():
            scores[int(name)].append(rows)

    for index, prompt in enumerate(prompts):
        assert at[index] == len(prompt)
        torch.testing.assert_close(torch.cat(scores[index]), expected[index], **TOLERANCE)


def test_padding_rows_change_nothing(case):
    config, weights, prompts, expected = case
    driver = ModelDriver(a_model(config, weights))

    driver.step({"b": prompts[1][:-1]}, padding=3)
    scores = driver.step({"a": prompts[2], "b": prompts[1][-1:]}, padding=5)

    torch.testing.assert_close(scores["a"], expected[2], **TOLERANCE)
    torch.testing.assert_close(scores["b"], expected[1][-1:], **TOLERANCE)


def test_bfloat16_stays_near_float32(case):
    config, weights, prompts, expected = case
    driver = ModelDriver(a_model(config, weights, a_build(torch.bfloat16)))

    scores = driver.step({"only": prompts[0]})["only"]

    # Scores have a standard deviation near 4; bfloat16 keeps about two digits of them.
    assert (scores - expected[0]).std() < 0.1 * expected[0].std()
