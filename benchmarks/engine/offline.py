"""How long do the first token and each further one take, offline, on random weights of published models?

    python -m benchmarks.engine.offline [--models qwen3-0.6b ...] [--batches 1 8 ...] [--record h200-offline]

Prompts of 1024 random token ids, 128 new tokens, greedy, no prefix cache, through `LLM.generate`. A batch is
generated with one new token and with 128, three times each after a warm-up; T1 and T128 are the medians. The first
token takes T1, each further one (T128 - T1) / 127. Every model runs in a process of its own; `--profile` then also
shows what a decode step consists of.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.profiled import UNWATCHED_STEPS, WATCHED_STEPS, ProfiledCore
from benchmarks.engine.published import BATCHES, MODELS
from benchmarks.record import write_record
from tokamak import LLM, SamplingParams
from tokamak.config.options import EngineOptions
from tokamak.device.facts import device_facts
from tokamak.engine.configure import configure, engine_info, load_text
from tokamak.engine.core import EngineCore

ROUNDS = 3
STEP_TOKENS = 16384
"""Most tokens of a step: with nobody waiting for the next token of a stream, prompts may come in large pieces."""
WARM_UP_TOKENS = 8
PROFILED_TOKENS = 4 * (UNWATCHED_STEPS + WATCHED_STEPS)


def arguments() -> argparse.Namespace:
    """What was asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS][:3])
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="new tokens of the longer runs")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--graphs", help="startup on a GPU, auto on a CPU")
    parser.add_argument("--kernels", default="", help="backends, as op=backend,op=backend")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument(
        "--all-sizes", action="store_true", help="record the default sizes, not the batches alone"
    )
    parser.add_argument("--profile", action="store_true", help="show what a decode step is made of")
    parser.add_argument("--no-times", action="store_true", help="only profile")
    parser.add_argument(
        "--limit-s", type=float, default=480.0, help="begin no batch of a model later than this"
    )
    parser.add_argument("--record", help="write benchmarks/records/NAME.json")
    parser.add_argument("--rows", type=Path, help="append each row to this file, as JSON")
    parser.add_argument("--one", choices=[*MODELS], help="measure this model in this process")
    return parser.parse_args()


def main() -> None:
    """Measure every model, show a table, and write a record if one is named."""
    asked = arguments()
    if asked.one:
        measure(asked.one, asked)
        return
    rows: list[dict[str, Any]] = []
    for name in asked.models:
        found = _in_a_process(name)
        rows += found
        if asked.rows:
            _append(asked.rows, found)
    print(table(rows))
    if asked.record and rows:
        figures = {"protocol": protocol(asked), "rows": rows}
        print(write_record(asked.record, figures, device_facts(rows[0]["device"])))


def protocol(asked: argparse.Namespace) -> dict[str, object]:
    """How the figures were made."""
    return {
        "prompt_tokens": asked.prompt,
        "new_tokens": asked.new,
        "rounds": asked.rounds,
        "weights": "random",
        "sampling": "greedy",
        "prefix_caching": False,
        "kv_cache_dtype": asked.kv_cache_dtype,
        "recorded_sizes": "default" if asked.all_sizes else "the batches",
        "ttft_ms": "median of runs with one new token",
        "tpot_ms": "(median with all new tokens - ttft) / (new tokens - 1)",
    }


def _in_a_process(name: str) -> list[dict[str, Any]]:
    """The rows of a model, measured in a process of its own; what that says is shown."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.engine.offline", *sys.argv[1:]]
        done = subprocess.run([*command, "--one", name, "--rows", str(file)], check=False)
        if done.returncode:
            print(f"{name} ended with {done.returncode}", flush=True)
        if not file.is_file():
            return []
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _append(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def measure(name: str, asked: argparse.Namespace) -> None:
    """Measure a model at every batch; rows go to the file asked for as they come."""
    began = time.perf_counter()
    published = MODELS[name]
    batches = [
        b for b in asked.batches if not published.vllm_tpot_ms or b in published.vllm_tpot_ms
    ]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(published.config), encoding="utf-8")
        core, llm, device = _load(folder, batches, asked)
    start_s = time.perf_counter() - began
    loaded = ", ".join(f"{part} {seconds:.2f}" for part, seconds in llm.info.load_s.items())
    print(f"{name} on {device}: start {start_s:.1f} s ({loaded}); {llm.info.total_blocks} blocks")
    print("  " + ", ".join(f"{op}={backend}" for op, backend, _ in llm.info.choices), flush=True)
    with llm:
        for batch in batches:
            if time.perf_counter() - began > asked.limit_s:
                print(f"  batch {batch} and later: no time left", flush=True)
                break
            prompts = _prompts(batch, asked.prompt, llm.info.vocab_tokens)
            _generate(llm, next(prompts), WARM_UP_TOKENS)
            if not asked.no_times:
                row = {
                    "engine": "tokamak",
                    "model": name,
                    "device": device,
                    "batch": batch,
                    "isl": asked.prompt,
                    "osl": asked.new,
                    **_times(llm, prompts, asked),
                    "start_s": round(start_s, 2),
                    "load_s": {part: round(s, 2) for part, s in llm.info.load_s.items()},
                }
                print(f"  {json.dumps(row)}", flush=True)
                if asked.rows:
                    _append(asked.rows, [row])
            if asked.profile:
                core.watch()
                _generate(llm, next(prompts), PROFILED_TOKENS)
                found = core.profile
                lines = ["  not steady for long enough"] if found is None else found.lines()
                print("\n".join([f"  profile of batch {batch}:", *lines]), flush=True)


def _load(
    folder: str, batches: Sequence[int], asked: argparse.Namespace
) -> tuple[ProfiledCore, LLM, str]:
    longest = asked.prompt + max(asked.new, PROFILED_TOKENS) + 1
    sizes: dict[str, Any] = {}
    graphs = asked.graphs or ("auto" if asked.device == "cpu" else "startup")
    if not asked.all_sizes and graphs != "off":
        sizes = {"req_graph_sizes": tuple(batches)}
    config = configure(
        EngineOptions(
            model=folder,
            load_format="random",
            device=asked.device,
            graphs=graphs,
            kernels=asked.kernels,
            kv_cache_dtype=asked.kv_cache_dtype,
            enable_prefix_caching=False,
            max_model_len=min(2 * longest, 2048) if longest <= 2048 else longest,
            max_num_batched_tokens=STEP_TOKENS if asked.device != "cpu" else "auto",
            **sizes,
        ),
        progress=False,
    )
    tokenizer, template = load_text(config.model)
    core = ProfiledCore(EngineCore(config))
    info = engine_info(config, core.ready())
    return core, LLM.over(core, tokenizer, template, info), config.model.device


def _prompts(batch: int, tokens: int, vocab_tokens: int) -> Iterator[list[list[int]]]:
    """Batches of random prompts, no two alike."""
    chance = random.Random(batch)
    while True:
        yield [[chance.randrange(vocab_tokens - 1) for _ in range(tokens)] for _ in range(batch)]


def _generate(llm: LLM, prompts: list[list[int]], new: int) -> float:
    """Milliseconds of generating so many tokens for every prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    elapsed_ms = (time.perf_counter() - began) * 1e3
    short = [output for output in outputs if len(output.token_ids) != new]
    if short:
        raise RuntimeError(f"{len(short)} of {len(outputs)} outputs have not {new} tokens")
    return elapsed_ms


def _times(
    llm: LLM, prompts: Iterator[list[list[int]]], asked: argparse.Namespace
) -> dict[str, object]:
    """Medians, and what they were made of."""
    ones, alls, waits = [], [], llm.stats()
    for _ in range(asked.rounds):
        batch = next(prompts)
        ones.append(_generate(llm, batch, 1))
        alls.append(_generate(llm, batch, asked.new))
    after = llm.stats()
    first_ms, all_ms = statistics.median(ones), statistics.median(alls)
    return {
        "ttft_ms": round(first_ms, 2),
        "tpot_ms": round((all_ms - first_ms) / (asked.new - 1), 4),
        "out_tok_s": round(len(batch) * asked.new / all_ms * 1e3, 1),
        "ttft_all_ms": [round(ms, 2) for ms in ones],
        "total_all_ms": [round(ms, 2) for ms in alls],
        "waits_per_step": round(
            (after.host_waits - waits.host_waits) / max(after.steps - waits.steps, 1), 3
        ),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Our figures beside vLLM's and the targets."""
    lines = [
        f"{'model':14} {'batch':>5} {'tpot':>8} {'target':>7} {'vLLM':>7} {'ours/target':>11} {'ttft':>8} {'vLLM':>8} {'tok/s':>9}"
    ]
    for row in rows:
        published, batch = MODELS[row["model"]], row["batch"]
        target = published.target_tpot_ms.get(batch)
        ratio = f"{row['tpot_ms'] / target:11.2f}" if target else f"{'-':>11}"
        lines.append(
            f"{row['model']:14} {batch:5} {row['tpot_ms']:8.3f} {_or_dash(target, 7)} "
            f"{_or_dash(published.vllm_tpot_ms.get(batch), 7)} {ratio} {row['ttft_ms']:8.1f} "
            f"{_or_dash(published.vllm_ttft_ms.get(batch), 8)} {row['out_tok_s']:9.0f}"
        )
    return "\n".join(lines)


def _or_dash(value: float | None, width: int) -> str:
    return f"{value:{width}.2f}" if value is not None else f"{'-':>{width}}"


if __name__ == "__main__":
    main()
