"""How fast is the engine on this CPU, beside llama.cpp in the same run?

    python benchmarks/engine/cpu.py MODEL.gguf [--llama-python PYTHON --llama NAME=FILE.gguf ...]

Ours is the whole engine: scheduler, ragged prompts in one batch, sampling, detokenization. llama.cpp is
its bare decode loop (`llama_cpp_rates.py`, in any Python that has llama-cpp-python) with equal prompts and
no sampling. Both take turns, round by round, so that a slow minute of the machine meets both; a round
waits until other programs use little of the cores. Figures are medians of the rounds, and the best.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.record import write_record
from tokamak import LLM, SamplingParams
from tokamak.config.options import EngineOptions
from tokamak.engine.configure import configure, engine_info, load_text
from tokamak.engine.core import EngineCore
from tokamak.engine.messages import AddRequest, EngineStats, Ready, RequestUpdate

SEQUENCES = (1, 8, 32)
PROMPT_TOKENS = 128
RAGGED_TOKENS = 32
"""Prompts of a batch differ by up to this many tokens either way."""
STEPS = 32
PREFILL_TOKENS = 512
ARENA_BYTES = 768 * 1024**2
RATES = Path(__file__).with_name("llama_cpp_rates.py")


@dataclass(slots=True)
class TimedCore:
    """An engine core that notes when each step ended and how many tokens it brought."""

    core: EngineCore
    steps: list[tuple[float, int]] = field(default_factory=list)

    def ready(self) -> Ready:
        return self.core.ready()

    def add(self, message: AddRequest) -> None:
        self.core.add(message)

    def abort(self, request_ids: list[str]) -> None:
        self.core.abort(request_ids)

    def reset_prefix_cache(self) -> None:
        self.core.reset_prefix_cache()

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    def work_ahead(self) -> bool:
        return self.core.work_ahead()

    def step(self) -> list[RequestUpdate]:
        updates = self.core.step()
        tokens = sum(len(update.token_ids) for update in updates)
        self.steps.append((time.perf_counter(), tokens))
        return updates

    def stats(self) -> EngineStats:
        return self.core.stats()

    def close(self) -> None:
        self.core.close()


class Ours:
    """The engine under measurement."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        options = EngineOptions(
            model=model,
            threads=threads,
            dtype=dtype,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=ARENA_BYTES,
            max_num_seqs=max(SEQUENCES),
        )
        config = configure(options, progress=False)
        tokenizer, template = load_text(config.model)
        self._core = TimedCore(EngineCore(config))
        self.info = engine_info(config, self._core.ready())
        self.dtype = config.model.dtype
        self._llm = LLM.over(self._core, tokenizer, template, self.info)
        self._vocab = self.info.vocab_tokens

    def _prompt(self, number: int, tokens: int) -> list[int]:
        return [(number * 7919 + at * 104729) % (self._vocab - 64) + 32 for at in range(tokens)]

    def decode(self, sequences: int) -> float:
        """Tokens a second over the steps in which every sequence decodes."""
        spread = RAGGED_TOKENS if sequences > 1 else 0
        prompts = [
            self._prompt(at, PROMPT_TOKENS - spread + at * 2 * spread // max(1, sequences - 1))
            for at in range(sequences)
        ]
        self._core.steps.clear()
        # Enough tokens that all are still running when the last prompt is through.
        most = STEPS + sequences
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        self._llm.generate(prompts, params)
        full = [
            end - begin
            for (begin, before), (end, tokens) in zip(
                self._core.steps, self._core.steps[1:], strict=False
            )
            if tokens == before == sequences
        ]
        return sequences * len(full) / sum(full)

    def prefill(self) -> float:
        """Prompt tokens a second, from the request's arrival to its first token."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        (output,) = self._llm.generate([self._prompt(0, PREFILL_TOKENS)], params)
        timings = output.timings
        assert timings.first_token_s is not None
        return PREFILL_TOKENS / (timings.first_token_s - timings.arrived_s)

    def close(self) -> None:
        self._llm.close()


class Theirs:
    """llama.cpp on one file, one process per number of sequences, waiting between rounds."""

    def __init__(self, python: str, file: str, threads: int) -> None:
        self._command = [python, str(RATES), file, str(threads)]
        self._processes: dict[int, subprocess.Popen[str]] = {}

    def _ask(self, sequences: int, line: str) -> float:
        if sequences not in self._processes:
            self._processes[sequences] = subprocess.Popen(
                [*self._command, str(sequences)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": ""},
            )
        process = self._processes[sequences]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        return answer["tokens"] / answer["seconds"]

    def decode(self, sequences: int) -> float:
        return self._ask(sequences, f"decode {sequences} {PROMPT_TOKENS} {STEPS}")

    def prefill(self) -> float:
        return self._ask(1, f"prefill {PREFILL_TOKENS}")

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
            process.wait()


def wait_for_quiet(limit: float, patience_s: float) -> float:
    """Wait until other programs use less than `limit` of the cores; returns what they use."""
    own = psutil.Process()
    deadline = time.perf_counter() + patience_s
    while True:
        busy, mine = _busy_s(), sum(own.cpu_times()[:2])
        time.sleep(0.25)
        passed = _busy_s() - busy - (sum(own.cpu_times()[:2]) - mine)
        share = max(0.0, passed / 0.25 / (psutil.cpu_count() or 1))
        if share < limit or time.perf_counter() > deadline:
            return share


def _busy_s() -> float:
    times = psutil.cpu_times()
    return times.user + times.system + times.nice


@contextmanager
def _closing(engines: dict[str, Ours | Theirs]) -> Iterator[None]:
    try:
        yield
    finally:
        for engine in engines.values():
            engine.close()


def measure(
    engines: dict[str, Ours | Theirs], rounds: int, quiet: float, patience_s: float
) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """Tokens a second by scenario and engine, one number a round; and how busy others were."""
    scenarios = {"prefill": None, **{f"decode {n}": n for n in SEQUENCES}}
    rates: dict[str, dict[str, list[float]]] = {
        scenario: {name: [] for name in engines} for scenario in scenarios
    }
    shares = []
    for turn in range(rounds + 1):
        for scenario, sequences in scenarios.items():
            for name, engine in engines.items():
                share = wait_for_quiet(quiet, patience_s)
                rate = engine.prefill() if sequences is None else engine.decode(sequences)
                print(
                    f"{scenario} {name} {rate:.1f} ({share:.0%} others)",
                    file=sys.stderr,
                    flush=True,
                )
                if turn:  # the first round warms up
                    rates[scenario][name].append(round(rate, 1))
                    shares.append(round(share, 3))
        print(f"round {turn} of {rounds}", file=sys.stderr, flush=True)
    return rates, shares


def report(rates: dict[str, dict[str, list[float]]], shipped: str | None) -> dict[str, object]:
    """Medians, best figures, and ours as ratios of theirs."""
    figures: dict[str, object] = {}
    for scenario, by_engine in rates.items():
        medians = {name: round(statistics.median(of), 1) for name, of in by_engine.items()}
        bests = {name: max(of) for name, of in by_engine.items()}
        others = [name for name in by_engine if name != "tokamak"]
        entry: dict[str, object] = {"median": medians, "best": bests, "rounds": by_engine}
        if others:
            entry["ratio_to_best_llama"] = round(
                medians["tokamak"] / max(medians[name] for name in others), 2
            )
            entry["ratio_of_bests"] = round(
                bests["tokamak"] / max(bests[name] for name in others), 2
            )
        if shipped in medians:
            entry["ratio_to_shipped"] = round(medians["tokamak"] / medians[shipped], 2)
        figures[scenario] = entry
    return figures


def main() -> None:
    """Measure, print and write a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quiet", type=float, default=0.05, help="share of others to wait for")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for it")
    parser.add_argument("--llama-python", help="a Python with llama-cpp-python")
    parser.add_argument("--llama", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--shipped", default="Q4_1", help="name of the file as shipped")
    parser.add_argument("--record", default="engine-cpu")
    asked = parser.parse_args()
    ours = Ours(asked.model, asked.threads, asked.dtype)
    engines: dict[str, Ours | Theirs] = {"tokamak": ours}
    for pair in asked.llama:
        name, _, file = pair.partition("=")
        engines[name] = Theirs(asked.llama_python or sys.executable, file, asked.threads)
    with _closing(engines):
        rates, shares = measure(engines, asked.rounds, asked.quiet, asked.patience)
    figures = report(rates, asked.shipped)
    for scenario, entry in figures.items():
        print(scenario, json.dumps({k: v for k, v in entry.items() if k != "rounds"}))  # pyright: ignore
    path = write_record(
        asked.record,
        {
            "what": "tokens a second; tokamak is the whole engine, the others llama.cpp by file",
            "model": Path(asked.model).name,
            "threads": asked.threads,
            "dtype": ours.dtype,
            "choices": [list(choice) for choice in ours.info.choices],
            "others_share_median": statistics.median(shares),
            "processor": platform.processor() or platform.machine(),
            "figures": figures,
        },
    )
    print(path)


if __name__ == "__main__":
    main()
