"""How do both completion routes ask for sampling, and how does that become a SamplingParams?"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from tokamak.core.request import SamplingParams, StructuredOutput
from tokamak.errors import RequestError
from tokamak.sampling.grammar import schema_text
from tokamak.server.protocol.common import Body, Int64, Items

MAX_CHOICES = 1024
"""The most choices, prompts times n, that one HTTP request may ask for."""

StopText = Annotated[str, Field(max_length=4096)]


def _numbers_by_name(value: object) -> object:
    """Refuse a map at its first wrong value, as `Items` refuses a list."""
    if isinstance(value, dict):
        value = cast("dict[str, object]", value)
        for key, number in value.items():
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not math.isfinite(cast("float", number)):
                raise PydanticCustomError(
                    "wrong_value", "it must be a finite number", {"name": key, "value": number}
                )
    return value


NumbersByName = Annotated[dict[str, float], BeforeValidator(_numbers_by_name)]


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    """End with a chunk that has no choices and the request's usage."""
    continuous_usage_stats: bool | None = None
    """Put the usage so far in every chunk."""
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Body):
    """The `json_schema` member of a response format."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Accepted and always on: the text matches the schema either way."""


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's way to constrain the text: exactly one of the members."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    """A JSON schema."""
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    """A grammar in Lark's syntax."""
    json_object: bool | None = None


class SamplingFields(Body):
    """Fields of both completion routes. A null field is as if it were left out."""

    model: str | None = None
    """One of the served names; left out, the first."""
    n: Int64 | None = None
    """How many independent choices; 1 if left out."""
    temperature: float | None = None
    """Divides the scores; 0 always takes the most likely token; 1 if left out."""
    top_p: float | None = None
    """Keep the smallest set of tokens whose probability reaches this; 0 is greedy."""
    top_k: Int64 | None = None
    """Keep this many tokens; 0 and -1 are off; more than the vocabulary is all of it."""
    min_p: float | None = None
    """Keep tokens at least this likely relative to the most likely one."""
    presence_penalty: float | None = None
    """From -2 to 2, taken once off every token already generated."""
    frequency_penalty: float | None = None
    """From -2 to 2, taken off once per occurrence in the generated text."""
    repetition_penalty: float | None = None
    """Divides the scores of tokens in prompt or output; 1 is off."""
    logit_bias: NumbersByName | None = None
    """Token ids, as JSON keys, to numbers added to their logits."""
    seed: Int64 | None = None
    """Makes the noise reproducible."""
    max_tokens: Int64 | None = None
    """The most tokens to generate."""
    min_tokens: Int64 | None = None
    """The fewest tokens before a stop may end the text."""
    stop: StopText | Items[StopText] | None = None
    """Up to 16 texts that end the answer and are not part of it."""
    stop_token_ids: Items[int] | None = None
    """Token ids that end the answer."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop text in the answer."""
    ignore_eos: bool | None = None
    """Go on after the end-of-sequence token."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; on if left out."""
    prompt_logprobs: Int64 | None = None
    """Alternatives per prompt token; not in a stream."""
    response_format: ResponseFormat | None = None
    """JSON of any shape, or of a schema."""
    structured_outputs: StructuredOutputs | None = None
    """One constraint on the text: json, regex, choice, grammar or json_object."""
    priority: Int64 | None = None
    """Lower runs first, if the server schedules by priority."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Prompts share cached prefixes only with prompts of the same salt."""
    return_token_ids: bool | None = None
    """Add the token ids of prompt and answer."""
    echo: bool | None = None
    """Begin the text with the prompt; in a chat, with the continued message."""
    stream: bool | None = None
    """Send the answer as events while it is made."""
    stream_options: StreamOptions | None = None
    """What a stream carries besides text."""
    user: str | None = None
    """Accepted: it names the end user and cannot change the answer."""

    @property
    def constraint_field(self) -> str:
        """The field that a bad constraint came in."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def check_stream(self) -> None:
        """Refuse what only makes sense with, or without, a stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is given, but stream is not true",
                field="stream_options",
                hint='add "stream": true, or leave stream_options out',
            )
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                f"prompt_logprobs is {self.prompt_logprobs}; a stream does not carry them",
                field="prompt_logprobs",
                hint='leave "stream" out',
            )

    def sampling_params(
        self,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """The engine's form of these fields; ranges are checked by `SamplingParams.validate`."""
        given: dict[str, Any] = {
            name: value for name in _SAME_NAMES if (value := getattr(self, name)) is not None
        }
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        return SamplingParams(
            **given,
            logit_bias=_bias(self.logit_bias),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs
            if self.prompt_logprobs is None
            else self.prompt_logprobs,
            structured=self.structured(),
        )

    def structured(self) -> StructuredOutput | None:
        """The constraint that `response_format` or `structured_outputs` asks for."""
        asked = self.response_format
        if asked is None or asked.type == "text":
            if asked is not None and asked.json_schema is not None:
                raise RequestError(
                    'response_format.json_schema is given, but response_format.type is "text"',
                    field="response_format.json_schema",
                )
            return _constraint(self.structured_outputs)
        if self.structured_outputs is not None:
            raise RequestError(
                "response_format and structured_outputs both constrain the text",
                field="structured_outputs",
                hint="give one of them",
            )
        if asked.type == "json_object":
            return StructuredOutput(kind="json_object")
        if asked.json_schema is None:
            raise RequestError(
                'response_format.json_schema is missing; type "json_schema" needs it',
                field="response_format.json_schema",
            )
        schema = schema_text(asked.json_schema.schema_, field="response_format.json_schema.schema")
        return StructuredOutput(kind="json_schema", value=schema)


_SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


def _bias(by_text: dict[str, float] | None) -> dict[int, float] | None:
    if by_text is None:
        return None
    by_id: dict[int, float] = {}
    for key, bias in by_text.items():
        if not (key.isascii() and key.isdigit() and len(key) < 19):
            raise RequestError(
                f'logit_bias has the key {key[:80]!r}; keys are token ids, such as "42"',
                field="logit_bias",
                hint="/tokenize tells the ids of a text",
            )
        by_id[int(key)] = bias
    return by_id


def _constraint(asked: StructuredOutputs | None) -> StructuredOutput | None:
    if asked is None:
        return None
    given = [name for name, value in asked if value is not None and value is not False]
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs has {' and '.join(given) or 'no constraint'}; it takes exactly one of"
            " json, regex, choice, grammar and json_object",
            field="structured_outputs",
        )
    if asked.json_ is not None:
        schema = schema_text(asked.json_, field="structured_outputs.json")
        return StructuredOutput(kind="json_schema", value=schema)
    if asked.regex is not None:
        return StructuredOutput(kind="regex", value=asked.regex)
    if asked.choice is not None:
        if not asked.choice:
            raise RequestError(
                "structured_outputs.choice is empty; it needs at least one text",
                field="structured_outputs.choice",
            )
        return StructuredOutput(kind="choice", value=json.dumps(asked.choice, ensure_ascii=False))
    if asked.grammar is not None:
        return StructuredOutput(kind="grammar", value=asked.grammar)
    return StructuredOutput(kind="json_object")
