"""Does the fast arithmetic keep the model's quality? Perplexity on the standard library's help topics.

    python -m benchmarks.engine.perplexity [--dtypes auto float32]

Text: `pydoc_data.topics`, sorted by key and joined by newlines; the first 40 windows of 512 tokens, each scored from
its second token on. The gate: at most 0.5 % above float32 as the file is stored. Topics differ between Python versions;
compare figures of one version only.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pydoc_data.topics import topics

from benchmarks.record import write_record
from tokamak import LLM, SamplingParams

WINDOWS = 40
WINDOW_TOKENS = 512
GATE = 1.005
SCORED = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)


def main() -> int:
    """Measure, print, write the record; the exit status says whether the gate holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "auto"])
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--record", default="cpu-perplexity")
    given = parser.parse_args()
    figures = {name: perplexity(given.model, name, given.windows) for name in given.dtypes}
    exact = figures[given.dtypes[0]]["perplexity"]
    worst = max(figure["perplexity"] for figure in figures.values())
    within = worst <= exact * GATE
    print(json.dumps(figures, indent=2))
    print(f"worst is {worst / exact - 1:+.3%} of {given.dtypes[0]}; the gate is +0.5 %")
    path = write_record(
        given.record, {"windows": given.windows, "figures": figures, "within_gate": within}
    )
    print("wrote", path)
    return 0 if within else 1


def perplexity(model: str, dtype: str, windows: int) -> dict[str, float]:
    """Perplexity over the windows with one arithmetic."""
    text = "\n".join(topics[name] for name in sorted(topics))
    with LLM(model, dtype=dtype, max_model_len=WINDOW_TOKENS, enable_prefix_caching=False) as llm:
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        prompts = [ids[at * WINDOW_TOKENS :][:WINDOW_TOKENS] for at in range(windows)]
        begun = time.perf_counter()
        outputs = llm.generate(prompts, SCORED)
        seconds = time.perf_counter() - begun
    logprobs = [
        entry.chosen.logprob
        for output in outputs
        for entry in output.prompt_logprobs or ()
        if entry is not None
    ]
    assert len(logprobs) == windows * (WINDOW_TOKENS - 1), len(logprobs)
    return {
        "perplexity": round(math.exp(-sum(logprobs) / len(logprobs)), 4),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    raise SystemExit(main())
