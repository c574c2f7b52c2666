"""Does attention that rotates, caches and attends at once give what the parts give, eager and recorded?"""

from __future__ import annotations

import pytest
import torch

from tests.support.steps import ModelDriver, a_build, a_model
from tests.support.tiny import llama_config, qwen3_config, tiny_weights, write_checkpoint
from tokamak.config.options import EngineOptions
from tokamak.engine.configure import configure
from tokamak.layers.attention.gqa import GroupedQueryAttention
from tokamak.ops.paged_attention.padded import padded_paged_attention
from tokamak.ops.registry import Backend
from tokamak.ops.rope import rotate_and_cache
from tokamak.ops.rotate_cache_attend import rotate_cache_attend
from tokamak.runner.assemble import assemble

CONFIGS = {"llama": llama_config(), "qwen3": qwen3_config()}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def at_once(
    qkv, positions, cos_sin, k_cache, v_cache, write_slots, q_norm, k_norm, eps,
    block_table, lengths, query_starts, q_width, scale, window, out, sinks,
):  # fmt: skip
    """The parts, in forms that can be recorded."""
    rotate = next(each.call for each in rotate_and_cache.backends if each.name == "llvm")
    q = rotate(qkv, positions, cos_sin, k_cache, v_cache, write_slots, q_norm, k_norm, eps)
    padded_paged_attention(
        q, k_cache, v_cache, block_table, lengths, query_starts, q_width, scale, window, out, sinks
    )  # fmt: skip


@pytest.fixture
def bodies(monkeypatch):
    """Which body each attention region ran, in order."""
    ran: list[str] = []
    for name in ("attend", "decode"):
        method = getattr(GroupedQueryAttention, name)

        def noting(self, rows, out, context, name=name, method=method):
            ran.append(name)
            method(self, rows, out, context)

        monkeypatch.setattr(GroupedQueryAttention, name, noting)
    return ran


def drivers(config):
    """The same model twice: by parts, and at once."""
    weights = tiny_weights(config)
    builds = (a_build(), a_build(prefer={"rotate_cache_attend": "reference"}))
    return [ModelDriver(a_model(config, weights, build)) for build in builds]


def scores_of(driver, steps):
    """Scores of all rows of some steps."""
    return [torch.cat(list(driver.step(work, padding=padding).values())) for work, padding in steps]


@every_config
def test_decode_steps_give_the_scores_of_the_parts(config, bodies):
    prompts = {"a": [5, 9, 2, 7, 1], "b": [3, 3, 8]}
    steps = [(prompts, 0), *[({"a": [4 + at], "b": [9 - at]}, at % 3) for at in range(6)]]
    by_parts, joined = drivers(config)
    expected = scores_of(by_parts, steps)
    assert set(bodies) == {"attend"}
    bodies.clear()

    found = scores_of(joined, steps)

    layers = len(bodies) // len(steps)
    assert bodies == ["attend"] * layers + ["decode"] * layers * 6
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@every_config
def test_decode_rows_beside_a_prompt_attend_as_before(config, bodies):
    steps = [({"a": [5, 9, 2]}, 0), ({"b": [1, 2, 3, 4], "a": [7]}, 2), ({"a": [6], "b": [6]}, 0)]
    by_parts, joined = drivers(config)
    expected = scores_of(by_parts, steps)
    bodies.clear()

    found = scores_of(joined, steps)

    layers = len(bodies) // len(steps)
    assert bodies == ["attend"] * layers * 2 + ["decode"] * layers
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@every_config
def test_recordings_of_both_kinds_hold_for_a_model_that_decodes_at_once(
    config, bodies, monkeypatch, tmp_path
):
    fast = Backend("at once", at_once, lambda facts: facts.vendor == "cpu")
    monkeypatch.setattr(rotate_cache_attend, "backends", [fast])
    folder = write_checkpoint(tmp_path / "model", config)
    options = EngineOptions(
        model=str(folder), dtype="fp32", threads=1, max_num_seqs=4, max_model_len=64, graphs="startup",
        req_graph_sizes=(1, 2, 4), token_graph_sizes=(4, 9), verify_graphs=True,
    )  # fmt: skip

    rank = assemble(configure(options))

    kinds = {verdict.graph for verdict in rank.verdicts}
    assert kinds == {"request", "token"}
    assert all(verdict.ok for verdict in rank.verdicts), rank.verdicts
    assert {"attend", "decode"} <= set(bodies)
