"""Are figures of the offline benchmark those of what was measured?"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks.engine.offline import table
from benchmarks.engine.profiled import WATCHED_STEPS, read_profile
from benchmarks.engine.published import MODELS
from tests.support.steps import a_build
from tokamak.checkpoint.source import open_checkpoint
from tokamak.models.registry import find


def an_event(name: str, start_us: int, us: int, device: str = "CUDA") -> SimpleNamespace:
    return SimpleNamespace(
        name=lambda: name,
        device_type=lambda: SimpleNamespace(name=device),
        start_ns=lambda: start_us * 1000,
        duration_ns=lambda: us * 1000,
    )


def a_profiler(*events: SimpleNamespace) -> SimpleNamespace:
    results = SimpleNamespace(events=lambda: list(events))
    return SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))


def test_the_gpu_is_busy_where_a_kernel_runs_and_idle_between():
    profiler = a_profiler(
        an_event("gemm", 100, 10),
        an_event("norm", 105, 10),
        an_event("gemm", 135, 5),
        an_event("step", 0, 500, device="CPU"),
        an_event("step", 90, 100),
    )

    profile = read_profile(profiler, {"launch": 3.0})

    assert (profile.wall_us, profile.busy_us, profile.idle_us) == (
        40 / WATCHED_STEPS,
        20 / WATCHED_STEPS,
        20 / WATCHED_STEPS,
    )
    assert profile.kernels == [
        ("gemm", 2 / WATCHED_STEPS, 15 / WATCHED_STEPS),
        ("norm", 1 / WATCHED_STEPS, 10 / WATCHED_STEPS),
    ]
    assert "launch 3" in profile.lines()[0]


def test_a_profile_without_a_gpu_has_no_kernels():
    profile = read_profile(a_profiler(an_event("step", 0, 500, device="CPU")), {})

    assert (profile.wall_us, profile.kernels) == (0.0, [])


def test_the_table_shows_our_time_beside_vllms_and_the_target():
    row = {"model": "llama-3-8b", "batch": 8, "tpot_ms": 9.2, "ttft_ms": 150.0, "out_tok_s": 800.0}

    line = table([row, row | {"model": "tiny"}]).splitlines()

    assert line[1].split() == ["llama-3-8b", "8", "9.200", "4.60", "5.22", "2.00", "150.0", "186.90", "800"]  # fmt: skip
    assert line[2].split() == ["tiny", "8", "9.200", "-", "-", "-", "150.0", "-", "800"]


@pytest.mark.parametrize("name", MODELS)
def test_every_published_config_builds_a_model(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name].config), encoding="utf-8")
    checkpoint = open_checkpoint(tmp_path)

    model = find(checkpoint.architecture).from_config(checkpoint.config, a_build())

    assert len(model.weights()) > MODELS[name].config["num_hidden_layers"]
    assert (checkpoint.scheme is not None) == name.endswith("-fp8")
