"""Are constraints checked, followed and ended, token by token?"""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.support.sampling import (
    EOS_ID,
    TURN_END_ID,
    SamplerBench,
    a_grammar_factory,
    a_tokenizer,
    structured,
    vocab_tokens,
)
from tokamak.core.request import SamplingParams, StructuredOutput
from tokamak.errors import GrammarError
from tokamak.sampling.grammar import check_structured, schema_text
from tokamak.sampling.grammar_state import GrammarFactory

ENDS = frozenset({EOS_ID})


def nested(depth):
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


def properties(count):
    return json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(count)}})


def linked(count):
    """Schemas that refer to each other in a chain."""
    chain = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)
    }
    return json.dumps({"$defs": chain | {f"d{count}": {}}, "$ref": "#/$defs/d0"})


def rules(count):
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(count)), f'r{count}: "a"'])


REFUSED = {
    "an unknown type": ("json_schema", '{"type":"objekt"}', "objekt"),
    "a missing reference": ("json_schema", '{"$ref":"#/missing"}', "/missing"),
    "bounds that cross": (
        "json_schema",
        '{"type":"object","properties":{"a":{"type":"integer","minimum":5,"maximum":1}}}',
        "#/properties/a is unsatisfiable: minimum 5, maximum 1",
    ),
    "open bounds that meet": ("json_schema", '{"exclusiveMinimum":1,"maximum":1}', "unsatisfiable"),
    "lengths that cross": ("json_schema", '{"minLength":3,"maxLength":2}', "unsatisfiable"),
    "a bad pattern": ("json_schema", '{"type":"string","pattern":"("}', "unclosed group"),
    "deep nesting": ("json_schema", nested(2000), "100 deep"),
    "nesting just too deep": ("json_schema", nested(50), "100 deep"),
    "a schema as a string": ("json_schema", '"{}"', "must be an object"),
    "a list": ("json_schema", "[]", "must be an object"),
    "a boolean": ("json_schema", "true", "must be an object"),
    "no JSON at all": ("json_schema", "{", "line 1"),
    "nothing": ("json_schema", "", "line 1"),
    "an oversized schema": ("json_schema", json.dumps({"enum": ["x" * 200] * 1000}), "bytes long"),
    "too many properties": ("json_schema", properties(2001), "2001 properties"),
    "a keyword we do not know": ("json_schema", '{"not":{"type":"string"}}', "not"),
    "options for the compiler": ("json_schema", '{"x-guidance":{}}', "x-guidance"),
    "a lone surrogate": ("json_schema", '{"enum":["\\ud800"]}', "hex escape"),
    "quotes without end": ("json_schema", '"' + '\\"' * 60_000, "Unterminated"),
    "a bad regex": ("regex", "(", "unclosed group"),
    "a regex that looks ahead": ("regex", "(?=a)b", "look-around"),
    "a long regex": ("regex", "a" * 40_000, "bytes long"),
    "deep groups": ("regex", "(" * 5000 + "a" + ")" * 5000, "invalid regex"),
    "an unknown rule": ("grammar", "start: nope", "nope"),
    "no grammar": ("grammar", "", "Empty grammar"),
    "a grammar of many lines": ("grammar", "\n" * 2000 + 'start: "a"', "2000 lines"),
    "deep JSON in a grammar": (
        "grammar",
        "start: %json " + '{"items":' * 2000 + "{}" + "}" * 2000,
        "recursion limit",
    ),
    "no choices": ("choice", "[]", "JSON list of strings"),
    "a choice that is a number": ("choice", '["a", 1]', "1 is not a string"),
    "an empty choice": ("choice", '["a", ""]', "'' is not a string"),
    "choices that are no list": ("choice", '{"a":1}', "JSON list of strings"),
    "choices nested deep": ("choice", "[" * 60_000, "JSON list of strings"),
    "choices that are no JSON": ("choice", "a|b", "line 1"),
}


@pytest.mark.parametrize(("kind", "value", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_constraint_is_refused_within_a_second_with_the_reason(kind, value, reason):
    started = time.monotonic()

    with pytest.raises(GrammarError) as refused:
        check_structured(StructuredOutput(kind=kind, value=value))

    assert time.monotonic() - started < 1.0
    assert refused.value.field == "response_format"
    assert reason in refused.value.message
    assert len(refused.value.message) < 700


ACCEPTED = {
    "any object": ("json_object", ""),
    "an empty schema": ("json_schema", "{}"),
    "the deepest schema": ("json_schema", nested(49)),
    "the most properties": ("json_schema", properties(2000)),
    "a long chain of references": ("json_schema", linked(1900)),
    "keywords as names": (
        "json_schema",
        '{"properties":{"minimum":{"type":"integer"},"maximum":{"type":"integer"}}}',
    ),
    "crossing bounds in data": ("json_schema", '{"const":{"minimum":5,"maximum":1}}'),
    "brackets in a string": ("json_schema", json.dumps({"const": "[" * 500})),
    "a regex": ("regex", r"[a-z]{2,5}\d"),
    "a grammar": ("grammar", 'start: "a" b*\nb: "b" | "c"'),
    "a long chain of rules": ("grammar", rules(1900)),
    "odd choices": ("choice", json.dumps(['q"uo\\te', "two\nlines", "ďábel 👩‍🚀", "/re/"])),
}


@pytest.mark.parametrize(("kind", "value"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_a_good_constraint_passes_within_a_second(kind, value):
    started = time.monotonic()

    check_structured(StructuredOutput(kind=kind, value=value))

    assert time.monotonic() - started < 1.0


def test_the_field_a_client_used_is_named():
    with pytest.raises(GrammarError) as refused:
        check_structured(StructuredOutput(kind="regex", value="("), field="guided_regex")

    assert refused.value.field == "guided_regex"


def test_a_schema_becomes_text_only_if_it_is_an_object():
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"items": deep}

    assert json.loads(schema_text({"type": "string", "const": "é"})) == {
        "type": "string",
        "const": "é",
    }
    for schema, reason in (("{}", "is a str"), (None, "NoneType"), (True, "bool"), (deep, "deep")):
        with pytest.raises(GrammarError, match=reason):
            schema_text(schema)


def test_checking_grammars_does_not_import_torch():
    program = "import sys, tokamak.sampling.grammar; sys.exit('torch' in sys.modules)"

    finished = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)

    assert finished.returncode == 0


def text_of(ids):
    return a_tokenizer().decode(ids, skip_special_tokens=True)


def generate(params, *, seed=0, steps=200, stop_ids=ENDS, prefer=None, output_ids=()):
    """Ids until one of stop_ids, an error, or a complete grammar; and the last step's outcome.

    Scores are random; `prefer` lifts some ids above all others.
    """
    vocab = vocab_tokens()
    bench = SamplerBench(
        [params],
        vocab=vocab,
        stop_ids=stop_ids,
        grammar=a_grammar_factory(),
        histories=[[5, *output_ids]],
    )
    generator = torch.Generator().manual_seed(seed)
    ids = list(output_ids)
    for _ in range(steps):
        logits = torch.randn(1, vocab, generator=generator)
        if prefer is not None:
            logits[0, list(prefer)] += 100.0
        sampled = bench.step(logits)
        if sampled.errors:
            return ids, sampled
        ids.append(int(sampled.token_ids[0]))
        if ids[-1] in stop_ids | set(params.stop_token_ids) or sampled.finished:
            return ids, sampled
    return ids, sampled


def test_a_choice_is_one_of_the_choices():
    choices = ['q"uo\\te', "two\nlines", "ďábel", "plain", "plainer"]
    params = structured("choice", json.dumps(choices))

    texts = {text_of(generate(params, seed=seed)[0]) for seed in range(40)}

    assert texts <= set(choices)
    assert len(texts) >= 3


def test_a_regex_is_matched_to_its_end():
    ids, sampled = generate(structured("regex", "[ab]{3}c"))

    assert len(text_of(ids)) == 4
    assert set(text_of(ids)[:3]) <= {"a", "b"}
    assert text_of(ids)[3] == "c"
    assert sampled.finished == {0}


def test_a_text_that_may_end_or_go_on_ends_when_the_model_says_so():
    params = structured("regex", "a+")

    ended, sampled = generate(params, prefer=[EOS_ID])
    long, _ = generate(params, prefer=a_tokenizer().encode("a").ids, steps=30)

    assert text_of(ended) == "a" * len(text_of(ended))
    assert ended[-1] == EOS_ID
    assert sampled.finished == {0}
    assert text_of(long) == "a" * 30


def test_an_end_of_sequence_cannot_come_before_the_grammar_allows_it():
    ids, _ = generate(structured("regex", "a{5}"), prefer=[EOS_ID, TURN_END_ID])

    assert text_of(ids) == "aaaaa"


def test_a_request_may_end_with_another_special_token_than_the_declared_one():
    params = structured("regex", "a+")

    ids, sampled = generate(params, prefer=[TURN_END_ID], stop_ids=frozenset({TURN_END_ID}))

    assert ids[-1] == TURN_END_ID
    assert set(text_of(ids)) == {"a"}
    assert sampled.finished == {0}


def test_a_special_stop_token_that_a_client_names_may_end_the_text():
    params = structured("regex", "a+", stop_token_ids=(TURN_END_ID,))

    ids, _ = generate(params, prefer=[TURN_END_ID])

    assert ids[-1] == TURN_END_ID


def test_a_stop_token_of_plain_text_is_text_to_the_grammar():
    letter = a_tokenizer().encode("b").ids[0]
    params = structured("regex", "a{3}b+", stop_token_ids=(letter,))

    ids, _ = generate(params, prefer=[letter])

    assert text_of(ids) == "aaab"


def test_a_complete_grammar_ends_a_request_that_ignores_end_of_sequence():
    params = structured("regex", "abc", ignore_eos=True)

    ids, sampled = generate(params, stop_ids=frozenset())

    assert text_of(ids) == "abc"
    assert sampled.finished == {0}


def test_ignoring_end_of_sequence_goes_on_while_the_grammar_can():
    params = structured("regex", "a+", ignore_eos=True)

    ids, sampled = generate(params, stop_ids=frozenset(), prefer=[EOS_ID], steps=20)

    assert len(ids) == 20
    assert not sampled.finished


def test_after_the_end_only_an_end_is_sampled():
    vocab = vocab_tokens()
    bench = SamplerBench(
        [structured("choice", '["a"]')], vocab=vocab, stop_ids=ENDS, grammar=a_grammar_factory()
    )

    steps = [bench.step(torch.randn(1, vocab)) for _ in range(4)]

    assert [step.token_ids.item() for step in steps] == [
        a_tokenizer().encode("a").ids[0],
        EOS_ID,
        EOS_ID,
        EOS_ID,
    ]
    assert all(step.finished == {0} and not step.errors for step in steps)


def test_the_grammar_wins_over_min_tokens_but_only_where_they_conflict():
    conflict, _ = generate(structured("choice", '["a"]', min_tokens=10))
    room, _ = generate(structured("regex", "a+", min_tokens=10), prefer=[EOS_ID])

    assert text_of(conflict) == "a"
    assert len(room) == 11
    assert room[-1] == EOS_ID


def test_a_grammar_goes_on_after_a_preemption_where_it_was():
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["some", "other"]}},
        "required": ["name"],
        "additionalProperties": False,
    }
    params = structured("json_schema", json.dumps(schema))
    whole, _ = generate(params, seed=3)

    for cut in range(len(whole)):
        resumed, sampled = generate(params, seed=cut, output_ids=whole[:cut])

        assert not sampled.errors
        assert "name" in json.loads(text_of(resumed))
        assert resumed[:cut] == whole[:cut]


def test_output_that_does_not_fit_the_grammar_fails_its_row_alone():
    vocab = vocab_tokens()
    wrong = a_tokenizer().encode("zzz").ids
    bench = SamplerBench(
        [structured("regex", "a+"), SamplingParams(temperature=0.0), structured("regex", "a+")],
        vocab=vocab,
        stop_ids=ENDS,
        grammar=a_grammar_factory(),
        histories=[[5, *wrong], [5], [5]],
    )
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0))

    sampled = bench.sample(logits)

    assert list(sampled.errors) == [0]
    assert "grammar cannot go on" in sampled.errors[0]
    assert sampled.token_ids[1] == logits[1].argmax()
    assert "a" in text_of(sampled.token_ids[2:].tolist()) or sampled.token_ids[2] == EOS_ID


def test_a_constraint_the_engine_cannot_compile_fails_its_row_alone():
    vocab = vocab_tokens()
    requests = [structured("regex", "("), SamplingParams(temperature=0.0)]

    sampled = SamplerBench(requests, vocab=vocab, grammar=a_grammar_factory()).sample(
        torch.randn(2, vocab)
    )

    assert list(sampled.errors) == [0]
    assert "unclosed group" in sampled.errors[0]


def test_structured_output_without_a_tokenizer_is_an_error_of_the_request():
    vocab = vocab_tokens()

    sampled = SamplerBench([structured("json_object")], vocab=vocab).sample(torch.zeros(1, vocab))

    assert "not available" in sampled.errors[0]


def test_a_tokenizer_that_cannot_be_read_is_an_error_of_the_request():
    broken = GrammarFactory('{"model": "unknown"}', vocab_tokens=10)

    sampled = SamplerBench([structured("json_object")], vocab=10, grammar=broken).sample(
        torch.zeros(1, 10)
    )

    assert "not available" in sampled.errors[0]


def test_scores_that_are_not_numbers_are_seen_behind_a_mask():
    vocab = vocab_tokens()
    logits = torch.zeros(1, vocab)
    logits[0, vocab - 1] = float("nan")

    sampled = SamplerBench(
        [structured("regex", "a+")], vocab=vocab, grammar=a_grammar_factory()
    ).sample(logits)

    assert "nan" in sampled.errors[0]


def test_ids_beyond_the_tokenizer_are_never_allowed():
    padding = range(a_tokenizer().get_vocab_size(), vocab_tokens())

    ids, _ = generate(structured("json_object"), prefer=padding, steps=60)

    assert not set(ids) & set(padding)


def test_rows_with_and_without_a_grammar_share_a_batch():
    vocab = vocab_tokens()
    schema = structured("json_schema", '{"type":"object","required":["x"],"properties":{"x":{}}}')
    requests = [SamplingParams(temperature=0.0), schema, SamplingParams(seed=1), schema]
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))

    together = SamplerBench(requests, vocab=vocab, grammar=a_grammar_factory()).sample(logits)
    alone = [
        SamplerBench([params], vocab=vocab, grammar=a_grammar_factory())
        .sample(logits[row : row + 1])
        .token_ids.item()
        for row, params in enumerate(requests)
    ]

    assert together.token_ids.tolist() == alone
    assert np.array(alone)[[1, 3]].tolist() != logits[[1, 3]].argmax(dim=1).tolist()
