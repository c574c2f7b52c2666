"""Does the oracle compute what transformers computes? And does the engine's model agree with it?"""

from __future__ import annotations

import pytest
import torch

from tests.support.oracle import Oracle
from tests.support.steps import ModelDriver, a_model
from tests.support.theirs import their_scores
from tests.support.tiny import (
    llama_config,
    mistral_config,
    qwen3_config,
    qwen3_moe_config,
    tiny_weights,
    write_checkpoint,
)

CONFIGS = {
    "llama": llama_config(attention_bias=True, mlp_bias=True),
    "llama-tied-linear-rope": llama_config(
        tie_word_embeddings=True, rope_scaling={"rope_type": "linear", "factor": 2.0}
    ),
    "llama-llama3-rope": llama_config(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    ),
    "mistral": mistral_config(),
    "qwen3": qwen3_config(use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3-untied": qwen3_config(tie_word_embeddings=False),
    "qwen3-moe": qwen3_moe_config(),
    "qwen3-moe-shares-of-all": qwen3_moe_config(norm_topk_prob=False, mlp_only_layers=[1]),
}
PROMPT = [
    int(token) for token in torch.randint(0, 320, (23,), generator=torch.Generator().manual_seed(5))
]


@pytest.fixture(params=CONFIGS)
def case(request, tmp_path):
    """A config, its weights, and the oracle over their checkpoint."""
    config = CONFIGS[request.param]
    weights = tiny_weights(config)
    return config, weights, Oracle(write_checkpoint(tmp_path, config, weights=weights))


def test_the_oracle_scores_like_transformers(case):
    config, weights, oracle = case

    scores = oracle.scores(PROMPT)

    (expected,) = their_scores(config, weights, [PROMPT])
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


def test_the_oracle_generates_from_the_scores_of_the_whole_text(case):
    _, _, oracle = case

    output = oracle.generate(PROMPT, 12)

    again = oracle.scores([*PROMPT, *output.token_ids])[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert output.token_ids == again.argmax(-1).tolist()
    torch.testing.assert_close(output.logprobs, again, rtol=1e-4, atol=1e-4)


def test_the_oracle_stops_after_a_stop_token(case):
    _, _, oracle = case
    free = oracle.generate(PROMPT, 12).token_ids
    stop = free[5]

    stopped = oracle.generate(PROMPT, 12, {stop}).token_ids

    assert stopped == free[: free.index(stop) + 1]


def test_a_model_generates_the_tokens_of_the_oracle(case):
    config, weights, oracle = case
    driver = ModelDriver(a_model(config, weights))

    output_ids = driver.greedy("only", PROMPT, 24)

    assert output_ids == oracle.generate(PROMPT, 24).token_ids


def test_the_oracle_reads_a_checkpoint_in_shards(tmp_path):
    config = llama_config()
    whole = Oracle(write_checkpoint(tmp_path / "whole", config))
    sharded = Oracle(write_checkpoint(tmp_path / "sharded", config, shards=3))

    assert torch.equal(whole.scores(PROMPT), sharded.scores(PROMPT))
