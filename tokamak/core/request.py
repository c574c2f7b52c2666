"""What a client asks for, and what a request has become so far.

`SamplingParams` crosses process boundaries, so it is a msgspec struct. `Request` is the scheduler's
state of one generation: integers and lists, no tensor.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec

from tokamak.errors import RequestError

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this choose the most likely token: dividing logits by them overflows."""

MAX_LOGPROBS = 20
"""The most alternatives per position a client may ask for, as in the OpenAI API."""

MAX_STOP_STRINGS = 16


class FinishReason(StrEnum):
    """Why a generation ended; the values are those of the OpenAI API, plus `abort` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the generated text: `value` is the schema, regex or Lark grammar as text."""

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice"]
    value: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next tokens are chosen and when to stop. Names and meanings follow vLLM.

    Attributes:
        n: how many independent continuations of the prompt.
        temperature: divides the logits; below 1e-5 the most likely token is taken.
        top_p: keep the smallest set of tokens whose probability reaches this; 0 is greedy, 1 is off.
        top_k: keep this many tokens; 0 and -1 are off; more than the vocabulary is clamped.
        min_p: keep tokens at least this likely relative to the most likely one; 0 is off.
        presence_penalty: subtracted once from the logit of every token already generated.
        frequency_penalty: subtracted once per occurrence in the generated text.
        repetition_penalty: divides (or multiplies, if negative) logits of tokens in prompt or output.
        logit_bias: token id to a number added to its logit.
        seed: makes the noise reproducible; keyed by (seed, sibling, position).
        max_tokens: most generated tokens; None means the rest of the context.
        min_tokens: fewest generated tokens before a stop token or end of sequence may end it.
        stop: strings that end the text; they are not returned unless include_stop_str_in_output.
        stop_token_ids: token ids that end the generation.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: alternatives per generated token; None is off, 0 is the chosen token alone.
        prompt_logprobs: the same for prompt tokens.
        skip_special_tokens: leave special tokens out of the text.
        structured: a constraint on the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_p == 0.0 or self.top_k == 1

    def validate(self, vocab_tokens: int) -> None:
        """Raise RequestError naming the first field that is out of range for this vocabulary."""
        _integer_in(self, "n", 1, 128)
        _number_in(self, "temperature", 0.0, 100.0)
        _number_in(self, "top_p", 0.0, 1.0)
        _integer_in(self, "top_k", -1, None)
        _number_in(self, "min_p", 0.0, 1.0)
        _number_in(self, "presence_penalty", -2.0, 2.0)
        _number_in(self, "frequency_penalty", -2.0, 2.0)
        _number_in(self, "repetition_penalty", 0.0, None)
        if self.repetition_penalty == 0.0:
            raise RequestError(
                "repetition_penalty is 0; it divides logits and must be greater than 0",
                field="repetition_penalty",
                hint="1 turns it off",
            )
        _integer_in(self, "min_tokens", 0, None)
        for name, low, high in (
            ("max_tokens", 0, None),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
            ("seed", -(2**63), 2**63 - 1),
        ):
            if getattr(self, name) is not None:
                _integer_in(self, name, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}",
                field="min_tokens",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed",
                field="stop",
            )
        if any(not text for text in self.stop):
            raise RequestError(
                'stop holds the empty string ""; a stop string needs a character', field="stop"
            )
        _ids_in_vocabulary("stop_token_ids", self.stop_token_ids, vocab_tokens)
        if self.logit_bias is not None:
            _ids_in_vocabulary("logit_bias", tuple(self.logit_bias), vocab_tokens)
            for token_id, bias in self.logit_bias.items():
                if not -100.0 <= bias <= 100.0:
                    raise RequestError(
                        f"logit_bias[{token_id}] is {bias}; a bias lies in [-100, 100]",
                        field="logit_bias",
                    )


def _number_in(params: SamplingParams, name: str, low: float, high: float | None) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}; it must be a finite number", field=name)
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name} is {value}; it must be {_range(low, high)}", field=name)


def _integer_in(params: SamplingParams, name: str, low: int, high: int | None) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; it must be an integer", field=name)
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name} is {value}; it must be {_range(low, high)}", field=name)


def _range(low: float, high: float | None) -> str:
    return f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"


def _ids_in_vocabulary(name: str, token_ids: tuple[int, ...], vocab_tokens: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_tokens:
            raise RequestError(
                f"{name} names token id {token_id}; the vocabulary is 0 to {vocab_tokens - 1}",
                field=name,
            )


class RequestState(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One generation as the scheduler sees it. `computed_tokens` are planned or done in caches."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    sibling: int = 0
    priority: int = 0
    cache_salt: str = ""
    arrival_s: float = 0.0
    state: RequestState = RequestState.WAITING
    slot: int = -1
    output_ids: list[int] = field(default_factory=list)
    most_tokens: int = 0
    """Prompt and output tokens at which it ends for length; set when it is queued."""
    computed_tokens: int = 0
    room_tokens: int = 0
    """Tokens that the blocks it holds have room for."""
    publish_tokens: int = sys.maxsize
    """Once so many tokens are written, another of its blocks is full; never while it holds none."""
    awaited_step: int = -1
    """The last launched step it was in when it was preempted; -1 for none."""
    cached_tokens: int = -1
    """Prompt tokens found in the prefix cache at first admission; -1 before it."""
    prefill_tokens: int = 0
    """Tokens known at the last admission: what prefill has to compute before a token is sampled."""
    scored_tokens: int = 0
    """Prompt log-probabilities delivered so far."""
    preemptions: int = 0
    arrival_order: int = 0
    finish_reason: FinishReason | None = None

    @property
    def known_tokens(self) -> int:
        """Prompt and output tokens whose ids the host has seen."""
        return len(self.prompt_ids) + len(self.output_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known token ids of positions [start, stop)."""
        prompt_tokens = len(self.prompt_ids)
        if stop <= prompt_tokens:
            return self.prompt_ids[start:stop]
        if start >= prompt_tokens:
            return self.output_ids[start - prompt_tokens : stop - prompt_tokens]
        return self.prompt_ids[start:] + self.output_ids[: stop - prompt_tokens]
