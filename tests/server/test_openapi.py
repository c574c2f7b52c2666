"""Does the server keep what /openapi.json says, whatever is sent?"""

from __future__ import annotations

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.live_server import serving
from tests.support.scripted_engine import says


@pytest.fixture(scope="module")
def fuzzed():
    with serving(says("Hello there.")) as live:
        yield live


@pytest.fixture(scope="module")
def api(fuzzed):
    return schemathesis.openapi.from_url(fuzzed.url + "/openapi.json")


OPERATIONS = {
    "POST /v1/chat/completions": 80,
    "POST /v1/completions": 80,
    "POST /tokenize": 40,
    "POST /detokenize": 40,
    "GET /v1/models": 5,
    "GET /v1/models/{model_id}": 20,
    "GET /health": 5,
    "GET /health/live": 5,
    "GET /health/ready": 5,
    "GET /health/progress": 5,
    "GET /metrics": 5,
    "GET /version": 5,
    "GET /debug/graphs": 5,
    "POST /reset_prefix_cache": 5,
}
"""How many requests are made up for each operation, half of them against the description."""


def test_every_described_operation_is_fuzzed(api):
    described = {result.ok().label for result in api.get_all_operations()}

    assert described == set(OPERATIONS)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("label", OPERATIONS)
def test_no_made_up_request_breaks_the_server_or_its_description(api, fuzzed, label, mode):
    method, path = label.split(" ")
    operation = api[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        mode = GenerationMode.POSITIVE

    @settings(
        max_examples=OPERATIONS[label] // 2,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers(case):
        case.call_and_validate(
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ]
        )

    answers()
    assert fuzzed.engine.health().alive
    assert fuzzed.chat(max_tokens=1).status_code == 200


@pytest.fixture(scope="module")
def description(fuzzed):
    return fuzzed.http.get("/openapi.json").json()


def test_every_reference_of_the_description_leads_somewhere(description):
    schemas = description["components"]["schemas"]

    def references(node):
        if isinstance(node, dict):
            for name, value in node.items():
                if name == "$ref":
                    yield value
                else:
                    yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    found = set(references(description))

    assert {ref.rsplit("/", 1)[1] for ref in found} <= set(schemas)
    assert all(ref.startswith("#/components/schemas/") for ref in found)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "logprobs": True,
                "top_logprobs": 2,
                "return_token_ids": True,
                "prompt_logprobs": 1,
            },
        ),
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 1, "echo": True}),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 0, "return_token_ids": True}),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/detokenize", {"tokens": [1]}),
        ("/reset_prefix_cache", {}),
        ("/v1/chat/completions", {"messages": []}),
    ],
    ids=str,
)
def test_answers_are_as_described(fuzzed, description, path, body):
    answer = fuzzed.http.post(path, json=body)

    operation = description["paths"][path]["post"]
    content = operation["responses"][str(answer.status_code)]["content"]
    schema = {**content["application/json"]["schema"], "components": description["components"]}
    jsonschema.validate(answer.json(), schema)
