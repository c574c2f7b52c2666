"""A conversation of two turns: `python examples/chat.py [MODEL]`."""

import sys

from tokamak import LLM, SamplingParams


def main(model: str = "smollm2-135m") -> None:
    """Ask, answer, ask again."""
    params = SamplingParams(temperature=0.0, max_tokens=40)
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    with LLM(model) as llm:
        first = llm.chat(messages, params)[0].text
        messages += [
            {"role": "assistant", "content": first},
            {"role": "user", "content": "And 3 + 3?"},
        ]
        second = llm.chat(messages, params)[0].text
    print(first, second, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
