"""Which engine requests does a client's request become, and is it one we can run?

In: a GenerationRequest with text or ids. Out: one AddRequest per sibling, with the prompt's ids, the settled
`max_tokens` and every id that ends it. What is wrong with a request is said here, before an engine hears of it;
what only the engine can know (a grammar, a full queue) comes back as an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tokamak.core.generation import GenerationRequest
from tokamak.core.request import SamplingParams
from tokamak.engine.messages import AddRequest
from tokamak.errors import ContextLengthError, RequestError
from tokamak.text.tokenizer import Tokenizer

LONG_TEXT_CHARACTERS = 2_000
"""Longer prompts are encoded off the event loop: about a millisecond of work."""


class Admission:
    """Turns requests for one model into engine requests, or says what is wrong with them."""

    def __init__(self, tokenizer: Tokenizer, vocab_tokens: int, max_model_len: int) -> None:
        """Admit for a model with `vocab_tokens` rows in its embedding: ids below this are fine."""
        self.tokenizer = tokenizer
        self.vocab_tokens = vocab_tokens
        self.max_model_len = max_model_len

    def admit(self, request: GenerationRequest) -> list[AddRequest]:
        """Engine requests of a request's siblings, named `<request id>:<sibling>`.

        Prompt and `max_tokens` together must fit in `max_model_len`; `max_tokens` None means what the
        prompt leaves. `max_tokens` 0 only computes the prompt, and may fill the whole context.

        Raises:
            RequestError: a field is out of range, an id is outside the vocabulary, or the prompt is empty.
            ContextLengthError: prompt and output do not fit; the message names both numbers.
        """
        params = request.params
        params.validate(self.vocab_tokens)
        prompt_ids = self.prompt_ids(request)
        max_tokens = self.settle_max_tokens(len(prompt_ids), params)
        stop_ids = self.stop_ids(params)
        return [
            AddRequest(
                request_id=f"{request.request_id}:{sibling}",
                prompt_ids=prompt_ids,
                params=params,
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                sibling=sibling,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
            for sibling in range(params.n)
        ]

    def prompt_ids(self, request: GenerationRequest) -> list[int]:
        """The prompt's ids, checked: at least one, all inside the vocabulary."""
        prompt = request.prompt
        if isinstance(prompt, str):
            self._refuse_endless(prompt)
            ids = self.tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
        else:
            ids = list(prompt)
            check_ids(ids, self.vocab_tokens)
        if not ids:
            raise RequestError(
                "prompt is empty; a model continues at least one token",
                field="prompt",
                hint="send some text, or the id of the beginning-of-sequence token",
            )
        return ids

    def settle_max_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        """How many tokens may be generated after a prompt of `prompt_tokens` tokens."""
        room = self.max_model_len - prompt_tokens
        asked = params.max_tokens
        if room < 0 or (room == 0 and asked != 0):
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens and the context holds {self.max_model_len}"
                + ("" if room < 0 else ", which leaves none for output"),
                field="prompt",
                hint=f"shorten the prompt to at most {self.max_model_len - 1} tokens",
            )
        if asked is None:
            if params.min_tokens > room:
                raise ContextLengthError(
                    f"min_tokens is {params.min_tokens}, but the prompt's {prompt_tokens} tokens leave"
                    f" {room} of the context's {self.max_model_len}",
                    field="min_tokens",
                )
            return room
        if asked > room:
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens and max_tokens is {asked}, together"
                f" {prompt_tokens + asked}; the context holds {self.max_model_len}",
                field="max_tokens",
                hint=f"ask for at most {room} tokens, or leave max_tokens out",
            )
        return asked

    def stop_ids(self, params: SamplingParams) -> list[int]:
        """Ids that end a generation: end-of-sequence unless ignored, and the client's own."""
        eos_ids = frozenset[int]() if params.ignore_eos else self.tokenizer.eos_ids
        return sorted(eos_ids.union(params.stop_token_ids))

    def _refuse_endless(self, text: str) -> None:
        """Refuse a text that cannot fit without encoding it, which would take seconds per megabyte.

        Blanks are not counted: a special token may swallow any number of those around it.
        """
        if len(text) <= self.max_model_len:
            return
        letters = len("".join(text.split()))
        tokens = -(-letters // self._longest_token)
        if tokens > self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, at least {tokens} tokens; the context holds"
                f" {self.max_model_len}",
                field="prompt",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token, which bound the characters it can stand for."""
        lengths = (len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.vocab_tokens))
        return max(lengths, default=1) or 1


def check_ids(ids: Sequence[int], vocab_tokens: int) -> None:
    """Raise RequestError naming the first prompt id that is no id of the vocabulary."""
    for at, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_tokens:
            raise RequestError(
                f"prompt[{at}] is {token_id!r}; token ids of this model are 0 to {vocab_tokens - 1}",
                field="prompt",
            )
