"""How long does the host prepare a decode step, by span and number of requests, and what does a step leave behind?

    OMP_NUM_THREADS=1 python -m benchmarks.engine.step_prep [--requests 1 16] [--graphs off] [--record step-prep-cpu]

Drives the runner with plans made by hand: a tiny model of random weights, every request one token a step. The first
steps are discarded; each size is measured in some repetitions, and the figures are the median of their medians with
the lowest and the highest. The exchange of the step is measured in processes of its own, by number of ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine.exchange_time import measure_exchange
from benchmarks.record import write_record
from tests.support.tiny import llama_config, write_checkpoint
from tokamak.config.options import EngineOptions
from tokamak.core.plan import Admission, Grants, Int32s, StepPlan
from tokamak.core.request import SamplingParams
from tokamak.engine.configure import configure
from tokamak.runner.assemble import Rank, assemble
from tokamak.telemetry.spans import SPANS

REQUESTS = (1, 4, 16, 64, 256)
CONTEXT_TOKENS = 512
"""Cached tokens of every request when it begins to decode."""
BLOCK_TOKENS = 16
DISCARDED_STEPS = 64
STEPS = 200
REPETITIONS = 3
DRIFT_STEPS = 100
PREPARATION = ("stage", "publish", "fill", "wait_status", "attn", "install")
BLOCKS = 512
"""Requests share blocks: what a step costs the host does not depend on what the caches hold."""


def a_rank(folder: Path, max_requests: int, graphs: str) -> Rank:
    """A rank over a tiny model."""
    tokens = CONTEXT_TOKENS + DISCARDED_STEPS + STEPS + DRIFT_STEPS + 2
    write_checkpoint(folder, llama_config(max_position_embeddings=2 * tokens))
    options = EngineOptions(
        model=str(folder),
        graphs=graphs,  # pyright: ignore[reportArgumentType]
        max_model_len=tokens,
        max_num_seqs=max_requests,
        max_num_batched_tokens=max(512, max_requests),
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=64 * 1024**2,
    )
    return assemble(configure(options, progress=False))


def decode_plans(requests: int) -> Iterator[StepPlan]:
    """Plans of one token per request and step, with a new block per request where the last one is full."""
    slots = np.arange(1, requests + 1, dtype=np.int32)
    final = np.zeros(requests, dtype=np.bool_)
    admissions = tuple(_admission(slot) for slot in range(1, requests + 1))
    held = 0
    for seq in range(sys.maxsize):
        computed = CONTEXT_TOKENS + seq
        needed = computed // BLOCK_TOKENS + 1
        plan = StepPlan(
            seq=seq,
            request_ids=tuple(f"r{slot}" for slot in slots),
            slots=slots,
            query_lens=np.ones(requests, dtype=np.int32),
            computed_before=np.full(requests, computed, dtype=np.int32),
            prefill_rows=0,
            final_chunk=final,
            admissions=(),
            grants=_grants(slots, held, needed),
        )
        yield plan if seq else replace(plan, admissions=admissions)
        held = needed


def _admission(slot: int) -> Admission:
    return Admission(
        request_id=f"r{slot}",
        slot=slot,
        token_ids=np.full(CONTEXT_TOKENS + 1, 7, dtype=np.int32),
        prompt_tokens=CONTEXT_TOKENS + 1,
        params=SamplingParams(temperature=0.0),
        sibling=0,
        max_tokens=1 << 20,
        stop_ids=frozenset(),
        scored_tokens=0,
    )


def _grants(slots: Int32s, held: int, needed: int) -> Grants:
    if held == needed:
        return Grants.none()
    entries = np.arange(held, needed, dtype=np.int32)
    count = len(slots) * len(entries)
    return Grants(
        groups=np.zeros(count, dtype=np.int32),
        slots=np.repeat(slots, len(entries)),
        entries=np.tile(entries, len(slots)),
        block_ids=(1 + np.arange(count, dtype=np.int32) % BLOCKS).astype(np.int32),
    )


class Decoding:
    """A rank that decodes, one step ahead of the results it takes."""

    def __init__(self, rank: Rank, requests: int) -> None:
        self._runner = rank.runner
        self._plans = decode_plans(requests)
        self._before = None

    def run(self, steps: int) -> list[int]:
        """Run some steps; returns the nanoseconds of each."""
        times: list[int] = []
        for _ in range(steps):
            start = time.perf_counter_ns()
            launched = self._runner.step(next(self._plans))
            if self._before is not None:
                self._before.take()
            self._before = launched
            times.append(time.perf_counter_ns() - start)
        return times


def measure(rank: Rank, requests: int) -> dict[str, float]:
    """Median microseconds of a step, of its preparation, and of every span that ran."""
    decoding = Decoding(rank, requests)
    decoding.run(DISCARDED_STEPS)
    steps = decoding.run(STEPS)
    recent = rank.runner.spans.recent_ns()[-STEPS:] / 1e3
    at = [SPANS.index(name) for name in PREPARATION]
    medians = {
        "step_us": statistics.median(steps) / 1e3,
        "preparation_us": float(np.median(recent[:, at].sum(axis=1))),
    }
    for name, column in zip(SPANS, recent.T, strict=True):
        if column.any():
            medians[f"{name}_us"] = float(np.median(column))
    return medians


def measure_drift(rank: Rank, requests: int) -> dict[str, int]:
    """What steady decode leaves behind: Python memory blocks, and device bytes where there is a device."""
    decoding = Decoding(rank, requests)
    decoding.run(DISCARDED_STEPS)
    # Collecting also empties the interpreter's free lists, which would look like growth.
    gc.collect()
    on_device = torch.cuda.is_available()
    device_bytes = torch.cuda.memory_allocated() if on_device else 0
    blocks = sys.getallocatedblocks()
    decoding.run(DRIFT_STEPS)
    gc.collect()
    drift = {"steps": DRIFT_STEPS, "python_blocks": sys.getallocatedblocks() - blocks}
    if on_device:
        drift["device_bytes"] = torch.cuda.memory_allocated() - device_bytes
    return drift


def summary(repetitions: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """By figure: the median of the repetitions, the lowest and the highest."""
    names = [name for name in repetitions[0] if all(name in each for each in repetitions)]
    values = {name: [each[name] for each in repetitions] for name in names}
    return {
        name: {
            "median": round(statistics.median(of), 1),
            "low": round(min(of), 1),
            "high": round(max(of), 1),
        }
        for name, of in values.items()
    }


def main() -> None:
    """Measure, print, and write a record if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    parser.add_argument("--ranks", type=int, nargs="*", default=(1, 2), help="of the exchange")
    parser.add_argument("--graphs", default="auto")
    parser.add_argument("--record", help="write benchmarks/records/NAME.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    by_requests: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        rank = a_rank(Path(folder), max(asked.requests), asked.graphs)
        for requests in asked.requests:
            rounds = [measure(rank, requests) for _ in range(REPETITIONS)]
            by_requests[str(requests)] = summary(rounds)
            print(requests, json.dumps(by_requests[str(requests)]), flush=True)
        drift = measure_drift(rank, min(asked.requests))
    exchange = [measure_exchange(ranks, STEPS) for ranks in asked.ranks]
    figures = {
        "protocol": {
            "context_tokens": CONTEXT_TOKENS,
            "discarded_steps": DISCARDED_STEPS,
            "steps": STEPS,
            "repetitions": REPETITIONS,
            "graphs": asked.graphs,
            "threads": 1,
        },
        "requests": by_requests,
        "drift": drift,
        "exchange": exchange,
    }
    print(json.dumps({"drift": drift, "exchange": exchange}))
    if asked.record:
        print(write_record(asked.record, figures))


if __name__ == "__main__":
    main()
