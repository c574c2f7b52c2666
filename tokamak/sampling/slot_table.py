"""What does the sampler know of the request in each slot?

One array per parameter, indexed by slot, so that a step looks up all its rows at once. Host memory only;
`device_table.py` has what a draw reads on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokamak.core.plan import Int32s
from tokamak.core.request import SamplingParams
from tokamak.device.staging import staged
from tokamak.sampling.grammar_state import GrammarState

Int64s = npt.NDArray[np.int64]

GREEDY_TOP_P = 1e-4
"""A nucleus this small is the most likely token, also where that token is less likely than this."""

_REPETITION_RANGE = (1e-30, 1e30)
"""Outside it a penalised logit would overflow float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotExtras:
    """Parts of a request's parameters that are not one number."""

    bias_ids: Int64s
    bias_values: npt.NDArray[np.float32]
    ban_ids: Int64s
    """Tokens that may not end the request before min_tokens."""
    grammar: GrammarState | None
    error: str
    """Why the request cannot be sampled at all; empty if it can."""


NO_EXTRAS = SlotExtras(
    bias_ids=np.empty(0, np.int64),
    bias_values=np.empty(0, np.float32),
    ban_ids=np.empty(0, np.int64),
    grammar=None,
    error="",
)


class SlotTable:
    """Sampling parameters by slot."""

    def __init__(self, slots: int, vocab_tokens: int) -> None:
        self.vocab_tokens = vocab_tokens
        self.greedy = np.ones(slots, np.bool_)
        self.plain = np.ones(slots, np.bool_)
        """Greedy, and nothing else: no stage changes its scores and nobody asks for logprobs."""
        self.temperature = np.ones(slots, np.float64)
        self.top_k = np.full(slots, vocab_tokens, np.int64)
        self.top_p = np.ones(slots, np.float64)
        self.min_p = np.zeros(slots, np.float64)
        self.repetition = np.ones(slots, np.float32)
        self.presence = np.zeros(slots, np.float32)
        self.frequency = np.zeros(slots, np.float32)
        self.prompt_tokens = np.zeros(slots, np.int32)
        self.min_tokens = np.zeros(slots, np.int64)
        self.logprobs = np.full(slots, -1, np.int64)
        """Alternatives per token; -1 is off."""
        self.has_bias = np.zeros(slots, np.bool_)
        self.has_grammar = np.zeros(slots, np.bool_)
        self.has_error = np.zeros(slots, np.bool_)
        self.key = np.zeros(slots, np.uint64)
        self.extras = [NO_EXTRAS] * slots

    def set(
        self,
        slot: int,
        params: SamplingParams,
        *,
        key: int,
        prompt_tokens: int,
        stop_ids: frozenset[int],
        grammar: GrammarState | None,
        error: str,
    ) -> None:
        """Fill a slot from a request's parameters, which were validated in the front end."""
        vocab = self.vocab_tokens
        bias = params.logit_bias or {}
        bans = {i for i in stop_ids | set(params.stop_token_ids) if 0 <= i < vocab}
        self.greedy[slot] = (
            params.greedy or params.top_p <= GREEDY_TOP_P or params.min_p >= 1.0 or vocab == 1
        )
        self.temperature[slot] = params.temperature
        self.top_k[slot] = min(params.top_k, vocab) if params.top_k > 0 else vocab
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = np.clip(params.repetition_penalty, *_REPETITION_RANGE)
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.prompt_tokens[slot] = prompt_tokens
        self.min_tokens[slot] = min(params.min_tokens, 2**62) if bans else 0
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.has_bias[slot] = bool(bias)
        self.has_grammar[slot] = grammar is not None
        self.has_error[slot] = bool(error)
        self.key[slot] = key
        self.plain[slot] = (
            self.greedy[slot]
            and params.repetition_penalty == 1.0
            and params.presence_penalty == 0.0
            and params.frequency_penalty == 0.0
            and params.logprobs is None
            and not (bias or error or self.min_tokens[slot])
            and grammar is None
        )
        self.extras[slot] = SlotExtras(
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
            ban_ids=np.array(sorted(bans), np.int64),
            grammar=grammar,
            error=error,
        )

    def clear(self, slot: int) -> None:
        """Forget the request in a slot."""
        self.set(
            slot,
            SamplingParams(temperature=0.0),
            key=0,
            prompt_tokens=0,
            stop_ids=frozenset(),
            grammar=None,
            error="",
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step: which slot each belongs to, and how far its request is."""

    table: SlotTable
    slots: Int32s  # [rows]
    positions: Int32s  # [rows] tokens so far, the index of the one to be sampled
    on_device: tuple[Tensor, Tensor] | None = None
    """The same two on the logits' device, if they are there already."""

    def places(self, rows: Int64s, device: torch.device) -> tuple[Tensor, Tensor]:
        """Slots and positions of some rows on a device, [some] each."""
        if self.on_device is not None and rows.size == len(self.slots):
            return self.on_device
        if self.on_device is not None:
            index = staged(rows, device)
            slots, positions = self.on_device
            return slots[index], positions[index]
        return staged(self.slots[rows], device), staged(self.positions[rows], device)

    def grammar(self, row: int) -> GrammarState:
        """The grammar of a row that has one."""
        grammar = self.extras(row).grammar
        assert grammar is not None, f"row {row} has no grammar"
        return grammar

    def extras(self, row: int) -> SlotExtras:
        """A row's parameters that are not one number."""
        return self.table.extras[self.slots[row]]

    def banned(self) -> Int64s:
        """Rows that may not end yet. [some] int64."""
        outputs = self.positions - self.table.prompt_tokens[self.slots]
        return np.flatnonzero(outputs < self.table.min_tokens[self.slots])
