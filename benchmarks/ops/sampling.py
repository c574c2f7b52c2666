"""How long does choosing tokens take, by kind of request and number of rows?

    python benchmarks/ops/sampling.py [--threads 2] [--vocab 49152] [--only top_p]

Prints the best and the median of repeated calls in milliseconds. Scores look like a language model's:
a few likely tokens, then a long tail.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from tokamak.core.request import SamplingParams
from tokamak.device.facts import cpu_facts
from tokamak.ops.load import load_backends
from tokamak.ops.sample import token_weights
from tokamak.sampling.sampler import Sampler

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(top_k=50),
    "top_p": SamplingParams(top_p=0.95),
    "top_k_top_p": SamplingParams(top_k=50, top_p=0.9, temperature=0.7),
    "min_p": SamplingParams(min_p=0.05),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    "presence": SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.5),
    "bias": SamplingParams(temperature=0.0, logit_bias={7: 1.0, 9: -1.0}),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
}
KNOWN_TOKENS = 500


def scores(rows: int, vocab: int) -> torch.Tensor:
    """Random rows with the shape of a language model's: [rows, vocab] float32."""
    generator = torch.Generator().manual_seed(0)
    tail = torch.randn(rows, vocab, generator=generator) * 2
    likely = torch.randint(0, vocab, (rows, 60), generator=generator)
    lift = torch.linspace(16, 8, 60).expand(rows, -1)
    return tail.scatter(1, likely, lift)


def measure(params: SamplingParams, rows: int, vocab: int, repeats: int) -> tuple[float, float]:
    """Best and median milliseconds of one call."""
    sampler = Sampler(
        vocab_tokens=vocab,
        slots=rows,
        device=torch.device("cpu"),
        grammar=None,
        entropy=b"bench",
        weigh=token_weights.bind(cpu_facts())[0],
    )
    for slot in range(rows):
        sampler.admit(
            slot,
            request_id=f"request-{slot}",
            params=params,
            sibling=0,
            max_tokens=1000,
            stop_ids=frozenset({2}),
            prompt_tokens=KNOWN_TOKENS // 2,
            output_ids=[],
        )
    history = torch.randint(0, vocab, (rows, KNOWN_TOKENS + 1), dtype=torch.int32)
    slots = np.arange(rows, dtype=np.int32)
    logits = scores(rows, vocab)
    taken = []
    for repeat in range(repeats):
        positions = np.full(rows, KNOWN_TOKENS - repeat % 50, np.int32)
        row_scores = logits.clone()
        started = time.perf_counter()
        sampler.sample(row_scores, slots, positions, history)
        taken.append((time.perf_counter() - started) * 1e3)
    return min(taken), sorted(taken)[repeats // 2]


def main() -> None:
    """Print one line per kind, one column pair per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", choices=KINDS, help="measure one kind")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    load_backends()
    print(f"vocab {asked.vocab}, {asked.threads} threads, best / median ms")
    print(f"{'':14s}" + "".join(f"{rows:>12d} rows" for rows in asked.rows))
    for name, params in KINDS.items():
        if asked.only not in (None, name):
            continue
        cells = [measure(params, rows, asked.vocab, asked.repeats) for rows in asked.rows]
        print(f"{name:14s}" + "".join(f"{best:9.3f} / {mid:5.2f}" for best, mid in cells))


if __name__ == "__main__":
    main()
