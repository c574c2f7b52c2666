"""Where does the host's time of a decode step go, and how long does the GPU wait for it?

    python -m benchmarks.engine.host_time [--models qwen3-0.6b] [--batches 1 4 32] [--record h200-host]

Turns of the engine's loop are timed part by part with the always-on spans, without a profiler in the way. Then PyTorch's
profiler watches a few more, for the time in which no kernel runs. With `--functions` a second run counts Python functions
(cProfile, which slows them).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.profiled import PREPARATION, ProfiledCore
from benchmarks.engine.published import MODELS
from benchmarks.record import write_record
from tokamak.config.options import EngineOptions
from tokamak.core.request import SamplingParams
from tokamak.device.facts import device_facts
from tokamak.engine.configure import configure
from tokamak.engine.core import EngineCore
from tokamak.engine.messages import AddRequest
from tokamak.telemetry.spans import SPANS

SKIPPED_STEPS = 32
STEPS = 96
PROFILED_STEPS = 40


def main() -> None:
    """Print medians in microseconds, and write a record if one is named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=["qwen3-0.6b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--functions", action="store_true")
    parser.add_argument("--record", help="write benchmarks/records/NAME.json")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    device = ""
    for name in asked.models:
        with tempfile.TemporaryDirectory() as folder:
            config = json.dumps(MODELS[name].config)
            (Path(folder) / "config.json").write_text(config, encoding="utf-8")
            options = EngineOptions(
                model=folder,
                load_format="random",
                graphs="startup",
                enable_prefix_caching=False,
                req_graph_sizes=tuple(asked.batches),
                token_graph_sizes=(),
                max_num_seqs=max(asked.batches),
            )
            settled = configure(options)
            device, core = settled.model.device, ProfiledCore(EngineCore(settled))
        for batch in asked.batches:
            row = measure(core, batch, asked.prompt, functions=asked.functions)
            rows.append({"model": name, **row})
            print(json.dumps(rows[-1]), flush=True)
        core.close()
    if asked.record:
        figures = {"prompt_tokens": asked.prompt, "steps": STEPS, "rows": rows}
        print(write_record(asked.record, figures, device_facts(device)))


def measure(core: ProfiledCore, batch: int, prompt: int, *, functions: bool) -> dict[str, Any]:
    """Decode steps of a batch: microseconds of a turn, of its spans, and without a kernel on the GPU."""
    chance = random.Random(batch)
    for at in range(batch):
        core.add(
            AddRequest(
                request_id=f"{batch}-{at}",
                prompt_ids=[chance.randrange(1000, 60000) for _ in range(prompt)],
                params=SamplingParams(temperature=0.0, ignore_eos=True),
                max_tokens=SKIPPED_STEPS + STEPS + PROFILED_STEPS,
                stop_ids=[],
                sibling=0,
                priority=0,
                cache_salt="",
            )
        )
    before = core.stats().generated_tokens
    while core.stats().generated_tokens < before + batch * SKIPPED_STEPS:
        core.step()
    runner = core.core._executor.rank.runner
    first = runner.spans.steps
    turns = []
    profile = cProfile.Profile()
    if functions:
        profile.enable()
    for _ in range(STEPS):
        began = time.perf_counter()
        core.step()
        turns.append(time.perf_counter() - began)
    profile.disable()
    kept = runner.spans.recent_ns()[-(runner.spans.steps - first) :]
    parts = {name: round(float(np.median(kept[:, at])) / 1e3, 1) for at, name in enumerate(SPANS)}
    if functions:
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)
    core.watch()
    while core.has_work:
        core.step()
    return {
        "batch": batch,
        "turn_us": round(statistics.median(turns) * 1e6, 1),
        "host_us": {name: us for name, us in parts.items() if us},
        "preparation_us": round(sum(parts[name] for name in PREPARATION), 1),
        "gpu_idle_us": None if core.profile is None else round(core.profile.idle_us, 1),
    }


if __name__ == "__main__":
    main()
