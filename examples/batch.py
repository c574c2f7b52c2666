"""Many prompts at once, each with its own parameters: `python examples/batch.py [MODEL]`."""

import sys

from tokamak import LLM, SamplingParams


def main(model: str = "smollm2-135m") -> None:
    """Continue four prompts together."""
    prompts = ["The sea is", "Bread is made of", "In the morning", "1, 2, 3,"]
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=16) for seed in range(4)]
    with LLM(model, max_num_seqs=4) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            print(f"{prompt!r} -> {output.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
