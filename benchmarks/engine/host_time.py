"""Where does the host's time of a decode step go, without a profiler in the way?

    python -m benchmarks.engine.host_time --model qwen3-0.6b --batch 1

Turns of the engine's loop are timed part by part with the always-on spans and a clock around the rest: planning,
launching, waiting, committing. With `--functions` a second run counts Python functions (cProfile, which slows them).
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

import numpy as np

from benchmarks.engine.published import MODELS
from tokamak.config.options import EngineOptions
from tokamak.core.request import SamplingParams
from tokamak.engine.configure import configure
from tokamak.engine.core import EngineCore
from tokamak.engine.messages import AddRequest
from tokamak.telemetry.spans import SPANS

SKIPPED_STEPS = 32
STEPS = 96


def main() -> None:
    """Print medians in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--functions", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps(MODELS[asked.model].config)
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
        core = EngineCore(configure(options))
        for batch in asked.batches:
            measure(core, batch, asked.prompt, functions=asked.functions)
        core.close()


def measure(core: EngineCore, batch: int, prompt: int, *, functions: bool) -> None:
    """Run a batch to its end, timing the turns in which all of it decodes."""
    chance = random.Random(batch)
    for at in range(batch):
        core.add(
            AddRequest(
                request_id=f"{batch}-{at}",
                prompt_ids=[chance.randrange(1000, 60000) for _ in range(prompt)],
                params=SamplingParams(temperature=0.0, ignore_eos=True),
                max_tokens=SKIPPED_STEPS + STEPS + 40,
                stop_ids=[],
                sibling=0,
                priority=0,
                cache_salt="",
            )
        )
    before = core.stats().generated_tokens
    while core.stats().generated_tokens < before + batch * SKIPPED_STEPS:
        core.step()
    runner = core._executor.rank.runner
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
    parts = {name: np.median(kept[:, at]) / 1e3 for at, name in enumerate(SPANS)}
    shown = " ".join(f"{name} {value:.0f}" for name, value in parts.items() if value)
    print(f"batch {batch}: turn {statistics.median(turns) * 1e6:.0f} us; {shown}")
    if functions:
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)
    while core.has_work:
        core.step()


if __name__ == "__main__":
    main()
