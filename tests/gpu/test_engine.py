"""Does the whole engine run on a GPU: right tokens, one wait a step, no hidden ones, and nothing left behind?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.device import no_host_wait
from tests.support.oracle import Oracle
from tests.support.tiny import (
    VOCAB_TOKENS,
    llama_config,
    qwen3_moe_config,
    tiny_weights,
    write_checkpoint,
    write_json,
    write_scaled_checkpoint,
)
from tokamak.config.options import EngineOptions
from tokamak.config.places import CACHE_VARIABLE
from tokamak.core.request import FinishReason, SamplingParams, StructuredOutput
from tokamak.engine.configure import configure
from tokamak.engine.core import EngineCore
from tokamak.engine.messages import AddRequest
from tokamak.runner.simulate import simulate_start

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch.cuda.is_available() is False"),
]

POSITIONS = 4096
BAD_ID = 77
"""A token whose vector holds a NaN."""

CLEAR = 0.02
"""Log-probabilities this far apart are not confused by another order of additions."""

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=1, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=2, ignore_eos=True),
    SamplingParams(top_p=0.9, min_p=0.01, seed=3, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(seed=4, presence_penalty=0.3, frequency_penalty=0.2, ignore_eos=True),
    SamplingParams(temperature=0.0, logit_bias={30: 2.0}, min_tokens=100, stop_token_ids=[31]),
]


@pytest.fixture(scope="module", autouse=True)
def _kept_here(tmp_path_factory):
    """What recordings take is kept for these tests, and for no other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


CONFIG = llama_config(max_position_embeddings=POSITIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", CONFIG)


@pytest.fixture
def start(folder):
    """Starts an engine on the GPU."""
    cores = []

    def make(**changes):
        asked = {
            "model": str(folder),
            "device": "cuda",
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 128,
            "kv_cache_memory_bytes": 64 * 1024**2,
            "graphs": "startup",
            "req_graph_sizes": (1, 2, 4, 8, 16),
            "token_graph_sizes": (32, 64, 128),
            **changes,
        }
        cores.append(EngineCore(configure(EngineOptions(**asked))))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, VOCAB_TOKENS, count).tolist()


def add(core, name, prompt, params=GREEDY, max_tokens=32):
    core.add(
        AddRequest(
            request_id=name,
            prompt_ids=prompt,
            params=params,
            max_tokens=max_tokens,
            stop_ids=[],
            sibling=0,
            priority=0,
            cache_salt="",
        )
    )


def run(core):
    """Steps until nothing is left; by request its tokens and its last update."""
    tokens, last = {}, {}
    while core.has_work:
        for update in core.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            last[update.request_id] = update
    return tokens, last


def assert_oracles(oracle, prompt, found):
    """The oracle's tokens, as far as no choice was close; most of them must be compared."""
    expected = oracle.generate(prompt, len(found))
    best = expected.logprobs.topk(2, dim=1).values
    close = (best[:, 0] - best[:, 1] < CLEAR).nonzero()
    clear = int(close[0]) if len(close) else len(found)
    assert found[:clear] == expected.token_ids[:clear]
    return clear


@pytest.mark.parametrize(
    "config",
    [llama_config(), qwen3_moe_config(moe_intermediate_size=64)],
    ids=["dense", "with experts"],
)
def test_8_bit_weights_give_the_scores_that_a_cpu_computes_from_them(start, tmp_path, config):
    folder = write_scaled_checkpoint(tmp_path / "model", config, block=(32, 32))
    eager = {"graphs": "off", "req_graph_sizes": "auto", "token_graph_sizes": "auto"}
    as_gpu = {**eager, "device": "cpu", "kernels": "linear=fp8,scaled_experts=reference"}
    gpu = start(model=str(folder), dtype="bfloat16")
    cores = [
        gpu,
        start(model=str(folder), dtype="bfloat16", **eager),
        start(model=str(folder), dtype="bfloat16", **as_gpu),
        start(model=str(folder), dtype="float32", **as_gpu),
    ]
    params = SamplingParams(temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    scores, tokens = [], []
    for core in cores:
        add(core, "all", ids(120, 5), params, max_tokens=16)
        found, chosen = [], []
        while core.has_work:
            for update in core.step():
                found += [each.logprobs[0] for each in update.prompt_logprobs]
                chosen += update.token_ids
        scores.append(torch.tensor(found))
        tokens.append(chosen)

    backends = {op: backend for op, backend, _ in gpu.ready().choices}
    assert "fp8" in backends["linear"]
    assert backends.get("scaled_experts", "triton") == "triton"
    assert tokens[0] == tokens[1]
    assert len(scores[0]) == 119
    # Other additions give some numbers the other of two near codes: as far as float32 is from bfloat16.
    spread = (scores[2] - scores[3]).abs().mean()
    assert (scores[0] - scores[2]).abs().mean() < 1.5 * spread


@pytest.mark.parametrize("graphs", ["startup", "off"])
def test_greedy_tokens_are_the_oracles(start, folder, graphs):
    sizes = {"req_graph_sizes": "auto", "token_graph_sizes": "auto"} if graphs == "off" else {}
    core, oracle = start(graphs=graphs, **sizes), Oracle(folder)
    prompts = {f"r{at}": ids(count, at) for at, count in enumerate((1, 16, 17, 100, 129, 200, 300))}
    for name, prompt in prompts.items():
        add(core, name, prompt)

    tokens, last = run(core)

    compared = [assert_oracles(oracle, prompt, tokens[name]) for name, prompt in prompts.items()]
    assert all(update.finish_reason is FinishReason.LENGTH for update in last.values())
    assert sum(compared) > 0.4 * 32 * len(prompts)


def steady(core, requests, max_tokens=400):
    """An engine in which these requests decode."""
    for at, params in enumerate(requests):
        add(core, f"r{at}", ids(20 + at, at), params, max_tokens)
    for _ in range(12):
        core.step()
    assert core.stats().running_requests == len(requests)


@pytest.mark.parametrize("graphs", ["startup", "off"])
@pytest.mark.parametrize(
    "requests", [[GREEDY] * 5, MIXED, [*MIXED, *MIXED]], ids=["greedy", "mixed", "more"]
)
def test_steady_decode_hides_no_wait_and_waits_once_a_step(start, graphs, requests):
    sizes = {"req_graph_sizes": "auto", "token_graph_sizes": "auto"} if graphs == "off" else {}
    core = start(graphs=graphs, **sizes)
    steady(core, requests)
    before = core.stats()

    with no_host_wait():
        for _ in range(50):
            core.step()

    after = core.stats()
    assert after.steps - before.steps == 50
    assert after.host_waits - before.host_waits == 50
    core.abort([f"r{at}" for at in range(len(requests))])
    run(core)


def test_a_request_that_joins_hides_no_wait_while_it_is_admitted(start):
    core = start()
    steady(core, MIXED)
    # Its prompt steps attend in PyTorch calls that may read lengths; the decode steps after it may not.
    add(core, "late", ids(40, 99), MIXED[2], 400)
    for _ in range(4):
        core.step()
    before = core.stats()

    with no_host_wait():
        for _ in range(20):
            core.step()

    assert core.stats().host_waits - before.host_waits == 20
    assert core.stats().running_requests == len(MIXED) + 1


def test_waits_for_grammars_and_logprobs_are_counted(start):
    core = start()
    choice = StructuredOutput(kind="regex", value="[ab]{200,300}")
    add(core, "grammar", ids(20, 1), SamplingParams(temperature=0.0, structured=choice), 60)
    add(core, "scored", ids(20, 2), SamplingParams(temperature=0.0, logprobs=3, ignore_eos=True))
    for _ in range(8):
        core.step()
    before = core.stats()

    for _ in range(10):
        core.step()

    waits = core.stats().host_waits - before.host_waits
    assert waits > 10
    assert not waits % 10


def test_two_thousand_steps_leave_nothing_on_the_device(start):
    core = start(max_model_len=POSITIONS, max_num_seqs=4, req_graph_sizes=(1, 2, 4))
    steady(core, MIXED[:3], max_tokens=3000)
    for _ in range(100):
        core.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    for _ in range(2000):
        core.step()

    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert core.stats().running_requests == 3


def test_a_row_of_nans_ends_its_request_alone_when_its_token_arrives(start, folder, tmp_path):
    weights = tiny_weights(CONFIG)
    weights["model.embed_tokens.weight"][BAD_ID] = float("nan")
    poisoned = write_checkpoint(tmp_path / "poisoned", CONFIG, weights=weights)
    core, oracle = start(model=str(poisoned)), Oracle(folder)
    add(core, "good", ids(20, 1))
    add(core, "bad", [*ids(10, 2), BAD_ID])
    add(core, "drawn", [*ids(10, 3), BAD_ID], SamplingParams(seed=1, top_p=0.9))

    tokens, last = run(core)

    for name in ("bad", "drawn"):
        assert last[name].finish_reason is FinishReason.ERROR
        assert last[name].error == "the model's scores hold nan"
    assert assert_oracles(oracle, ids(20, 1), tokens["good"])
    assert core.stats().free_blocks == core.stats().total_blocks


@pytest.mark.parametrize("graphs", ["startup", "serving", "on-demand", "off"])
def test_a_golden_run_with_arrivals_finishes_and_preemptions_gives_the_oracles_tokens(
    start, folder, graphs
):
    sizes = {"req_graph_sizes": "auto", "token_graph_sizes": "auto"} if graphs == "off" else {}
    cache = {"kv_cache_memory_bytes": "auto", "num_blocks_override": 24, "max_model_len": 128}
    core, oracle = start(graphs=graphs, **sizes, **cache), Oracle(folder)
    chance = np.random.default_rng(7)
    prompts = {f"r{at}": ids(int(chance.integers(2, 90)), at) for at in range(16)}
    waiting, tokens, ends = [*prompts], {}, 0
    for turn in range(400):
        if waiting and turn % 3 == 0:
            add(core, waiting[0], prompts[waiting[0]], max_tokens=20 + 2 * len(waiting))
            waiting = waiting[1:]
        for update in core.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            ends += update.finish_reason is FinishReason.LENGTH
        if not waiting and not core.has_work:
            break

    stats = core.stats()
    assert ends == len(prompts)
    assert stats.steps >= 50
    assert stats.preemptions > 0
    assert stats.free_blocks == stats.total_blocks
    assert sum(assert_oracles(oracle, prompts[name], tokens[name]) for name in prompts) > 60


def test_the_memory_plan_is_within_5_percent_of_what_is_held(start, tmp_path):
    wide = llama_config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, vocab_size=32000,
    )  # fmt: skip
    write_json(tmp_path / "config.json", wide)
    options = {
        "model": str(tmp_path),
        "load_format": "random",
        "dtype": "bfloat16",
        "kv_cache_memory_bytes": 16 * 1024**3,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 64,
        "req_graph_sizes": "auto",
        "token_graph_sizes": "auto",
    }
    # What the first start measured of recordings is what later ones plan with.
    start(**options).close()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    core = start(**options)
    plan = simulate_start(
        configure(EngineOptions(**{"device": "cuda", "max_model_len": 512} | options))
    )
    steady(core, MIXED[:3], max_tokens=64)

    held, memory = torch.cuda.memory_reserved() - before, plan.start.memory
    planned = plan.start.weight_bytes + memory.cache_bytes + memory.graph_bytes
    planned += memory.input_bytes + memory.logit_bytes
    assert held == pytest.approx(planned, rel=0.05)


def test_weights_drawn_on_the_device_are_the_same_again(start):
    found = []
    for _ in range(2):
        core = start(load_format="random", dtype="bfloat16", seed=5)
        add(core, "one", ids(30, 1))
        found.append(run(core)[0]["one"])

    assert found[0] == found[1]
    assert len(found[0]) == 32


def test_the_default_device_is_the_gpu(folder):
    config = configure(EngineOptions(model=str(folder)))

    assert (config.model.device, config.model.dtype) == ("cuda", "bfloat16")
    assert config.scheduler.max_num_seqs == 256
