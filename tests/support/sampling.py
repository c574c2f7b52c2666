"""Builders for tests of sampling: a sampler with requests in it, and a small real tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tokamak.core.request import SamplingParams, StructuredOutput
from tokamak.sampling.grammar_state import GrammarFactory
from tokamak.sampling.sampler import Sampled, Sampler

EOS_ID = 0
TURN_END_ID = 1
"""A second special token, which a chat model may also end with."""


@cache
def a_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of a few hundred tokens, with JSON-like merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>", "<turn>"],
        show_progress=False,
    )
    lines = ['{"name": "some value", "ok": true, "size": 12, "list": [1, 2.5, null]}'] * 20
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def vocab_tokens() -> int:
    """The model's vocabulary: some ids more than the tokenizer has, as padded models do."""
    return a_tokenizer().get_vocab_size() + 13


@cache
def a_grammar_factory() -> GrammarFactory:
    """Grammars over the small tokenizer."""
    return GrammarFactory(
        a_tokenizer().to_str(), vocab_tokens=vocab_tokens(), eos_ids=frozenset({EOS_ID})
    )


class SamplerBench:
    """A sampler whose slots hold the given requests, and their histories."""

    def __init__(
        self,
        requests: Sequence[SamplingParams],
        *,
        vocab: int,
        histories: Sequence[Sequence[int]] | None = None,
        prompt_tokens: Sequence[int] | None = None,
        siblings: Sequence[int] | None = None,
        stop_ids: frozenset[int] = frozenset(),
        grammar: GrammarFactory | None = None,
        slots: Sequence[int] | None = None,
        entropy: bytes = b"tests",
        max_len: int = 512,
    ) -> None:
        rows = len(requests)
        held = list(slots) if slots is not None else list(range(rows))
        known = histories if histories is not None else [[1]] * rows
        prompts = prompt_tokens if prompt_tokens is not None else [1] * rows
        self.slots = np.array(held, np.int32)
        self.positions = np.array([len(ids) for ids in known], np.int32)
        self.history = torch.zeros(max(held, default=0) + 1, max_len, dtype=torch.int32)
        self.sampler = Sampler(
            vocab_tokens=vocab,
            slots=max(held, default=0) + 1,
            device=torch.device("cpu"),
            grammar=grammar,
            entropy=entropy,
        )
        for row, params in enumerate(requests):
            self.history[held[row], : len(known[row])] = torch.tensor(known[row], dtype=torch.int32)
            self.sampler.admit(
                held[row],
                request_id=f"request-{row}",
                params=params,
                sibling=siblings[row] if siblings is not None else 0,
                max_tokens=1000,
                stop_ids=stop_ids | frozenset(params.stop_token_ids),
                prompt_tokens=prompts[row],
                output_ids=list(known[row][prompts[row] :]),
            )

    def sample(self, logits: Tensor) -> Sampled:
        """One step; the histories stay as they are."""
        return self.sampler.sample(logits.clone(), self.slots, self.positions, self.history)

    def step(self, logits: Tensor) -> Sampled:
        """One step, after which the sampled tokens are part of the histories."""
        sampled = self.sample(logits)
        for slot, position, token in zip(
            self.slots, self.positions, sampled.token_ids, strict=True
        ):
            self.history[slot, position] = token
        self.positions = self.positions + np.int32(1)
        return sampled


def sample_ids(requests: Sequence[SamplingParams], logits: Tensor, **options: object) -> list[int]:
    """The token of each row of one step; options are those of SamplerBench."""
    bench = SamplerBench(requests, vocab=logits.shape[1], **options)  # pyright: ignore[reportArgumentType]
    return bench.sample(logits).token_ids.tolist()


def structured(kind: str, value: str = "", **params: object) -> SamplingParams:
    """Greedy parameters with a constraint, unless told otherwise."""
    constraint = StructuredOutput(kind=kind, value=value)  # pyright: ignore[reportArgumentType]
    return SamplingParams(**{"temperature": 0.0, "structured": constraint} | params)  # pyright: ignore
