"""An answer that is valid JSON whatever the model would rather say: `python examples/structured.py [MODEL]`."""

import json
import sys

from tokamak import LLM, SamplingParams, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main(model: str = "smollm2-135m") -> None:
    """Ask for a person and parse the answer."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=60,
        structured=StructuredOutput(kind="json_schema", value=json.dumps(SCHEMA)),
    )
    with LLM(model) as llm:
        (answer,) = llm.chat([{"role": "user", "content": "Invent a person."}], params)
    print(json.loads(answer.text))


if __name__ == "__main__":
    main(*sys.argv[1:])
