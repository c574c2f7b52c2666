"""Does text sampled under a schema parse and validate, by another library's reading of the schema?"""

import json
import re

import jsonschema
import numpy as np
import pytest
import torch

from tests.support.sampling import (
    EOS_ID,
    SamplerBench,
    a_grammar_factory,
    a_tokenizer,
    structured,
    vocab_tokens,
)

WORD = {"type": "string", "maxLength": 12}
SCHEMAS = {
    "release": {
        "type": "object",
        "properties": {
            "version": WORD,
            "engineer": WORD,
            "environment": {"enum": ["staging", "production", "test"]},
            "rollback": {"type": "boolean"},
        },
        "required": ["version", "engineer", "environment", "rollback"],
        "additionalProperties": False,
    },
    "numbers": {
        "type": "object",
        "properties": {
            "whole": {"type": "integer", "minimum": -7, "maximum": 1234},
            "real": {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
            "nothing": {"type": "null"},
        },
        "required": ["whole", "real", "nothing"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": [1, {"c": None}]}, "c": WORD},
        "required": ["b"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"enum": ["x", 2, False]}, "minItems": 2, "maxItems": 5},
    "tuple": {
        "type": "array",
        "prefixItems": [WORD, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "either": {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-f]{4}$"}]},
    "references": {
        "$defs": {
            "leaf": {"type": "integer", "minimum": 0, "maximum": 9},
            "pair": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
                "required": ["left", "right"],
                "additionalProperties": False,
            },
        },
        "type": "array",
        "items": {"$ref": "#/$defs/pair"},
        "minItems": 1,
        "maxItems": 3,
    },
    "formats": {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "id": {"type": "string", "format": "uuid"},
        },
        "required": ["day", "id"],
        "additionalProperties": False,
    },
    "lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "tagged": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "a"}, "size": {"type": "integer", "maximum": 99}},
                "required": ["kind", "size"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "b"}},
                "required": ["kind"],
                "additionalProperties": False,
            },
        ]
    },
}


def texts(params, count, *, steps=400, closing=0.0):
    """Texts of a batch of requests under random scores; `closing` lifts quotes, brackets and ends."""
    vocab = vocab_tokens()
    bench = SamplerBench(
        [params] * count, vocab=vocab, grammar=a_grammar_factory(), stop_ids=frozenset({EOS_ID})
    )
    generator = torch.Generator().manual_seed(11)
    closers = [EOS_ID, *a_tokenizer().encode('"').ids, *a_tokenizer().encode("}").ids]
    closers += a_tokenizer().encode("]").ids
    ids: list[list[int]] = [[] for _ in range(count)]
    open_rows = set(range(count))
    for _ in range(steps):
        logits = torch.randn(count, vocab, generator=generator) * 2
        logits[:, closers] += closing
        sampled = bench.step(logits)
        assert not sampled.errors
        for row in sorted(open_rows):
            ids[row].append(int(sampled.token_ids[row]))
        open_rows -= sampled.finished
        if not open_rows:
            break
    assert not open_rows, f"{len(open_rows)} texts did not end"
    return [a_tokenizer().decode(row_ids, skip_special_tokens=True) for row_ids in ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_sampled_text_parses_and_validates(schema, temperature):
    params = structured("json_schema", json.dumps(schema), temperature=temperature, seed=1)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )

    written = texts(params, 8)

    for text in written:
        validator.validate(json.loads(text))
    if temperature:
        assert len(set(written)) > 1


def test_any_object_is_an_object_without_runs_of_whitespace():
    written = texts(structured("json_object", temperature=1.0, seed=2), 8, closing=3.0)

    for text in written:
        assert isinstance(json.loads(text), dict)


def test_a_model_that_loves_whitespace_cannot_pad_json():
    vocab = vocab_tokens()
    blank = [
        token
        for token in range(2, a_tokenizer().get_vocab_size())
        if not a_tokenizer().decode([token], skip_special_tokens=False).strip()
    ]
    schema = json.dumps(SCHEMAS["references"])
    bench = SamplerBench(
        [structured("json_schema", schema)],
        vocab=vocab,
        grammar=a_grammar_factory(),
        stop_ids=frozenset({EOS_ID}),
    )
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(1, vocab)).astype(np.float32))
    logits[0, blank] += 50.0

    ids = []
    for _ in range(200):
        sampled = bench.step(logits)
        ids.append(int(sampled.token_ids[0]))
        if sampled.finished:
            break

    text = a_tokenizer().decode(ids, skip_special_tokens=True)
    assert json.dumps(json.loads(text)) == text
    assert not re.search(r"\s\s", text)
