"""Which token does each row of logits become?

In: a step's logits, and per slot what its request asked for. Out: one token id per row, log-probabilities
for those who asked, and which rows failed. A row's outcome depends on its own request alone.

On a device nothing is waited for, but where a step needs numbers on the host: for grammars, which follow the
tokens, and for log-probabilities. Whether scores were usable is told by their peaks, which travel with the tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokamak.core.plan import Int32s, TokenLogprobs
from tokamak.core.request import SamplingParams
from tokamak.device.staging import staged
from tokamak.device.waits import HostWaits
from tokamak.errors import GrammarError
from tokamak.ops.sample import argmax_rows, draw_rows, token_weights
from tokamak.sampling import scan
from tokamak.sampling.device_table import DeviceTable
from tokamak.sampling.draw import Draw, Weigh, draw
from tokamak.sampling.grammar_state import GrammarFactory, GrammarState
from tokamak.sampling.logprobs import score
from tokamak.sampling.noise import request_key, seed_of, uniforms
from tokamak.sampling.slot_table import Int64s, Rows, SlotTable
from tokamak.sampling.stages import STAGES, History

DrawRows = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The op `draw_rows`, or a backend of it."""

HARMLESS_ID = 0
"""What a failed row gets; its request ends with an error and the id is not returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a step's logits became, row by row."""

    token_ids: Tensor  # [rows] int32, on the logits' device
    peaks: Tensor | None = None
    """[rows] float32, the highest scores, on the logits' device; None where `errors` knows of the bad ones."""
    logprobs: tuple[TokenLogprobs | None, ...]
    """Per row, None where not asked for."""
    errors: Mapping[int, str]
    """Rows that failed, with the reason: their request ends. `bad_peaks` tells those of `peaks`."""
    finished: frozenset[int]
    """Rows whose text is complete by their grammar: with this token nothing more may follow."""
    packed: Tensor | None = None
    """[rows, 2] int32, `token_ids` beside the bits of `peaks`, where they lie together already."""

    @staticmethod
    def nothing(device: torch.device) -> Sampled:
        """Of a step that samples no row."""
        return Sampled(
            token_ids=torch.zeros(0, dtype=torch.int32, device=device),
            logprobs=(),
            errors={},
            finished=frozenset(),
        )

    @staticmethod
    def of_packed(packed: Tensor) -> Sampled:
        """Plain rows that were chosen in a recording. packed: [rows, 2] int32, ids and the bits of peaks."""
        return Sampled(
            token_ids=packed[:, 0],
            peaks=packed[:, 1].view(torch.float32),
            logprobs=(None,) * packed.shape[0],
            errors={},
            finished=frozenset(),
            packed=packed,
        )


class Sampler:
    """Chooses tokens. One thread calls it, in the order of the steps.

    Args:
        vocab_tokens: columns of the logits.
        slots: requests that can be held at once.
        device: where logits and history are.
        grammar: makes grammar states; None if structured output is not available.
        entropy: bytes that unseeded requests draw their seeds from; None is fresh ones. Ranks that must
            agree on tokens are given the same.
        weigh: the bound op `token_weights`.
        find: the bound op `argmax_rows`; not used for scores on the host.
        draw_all: the bound op `draw_rows`; not used for scores on the host.
        waits: counts the waits of steps that need numbers on the host.
    """

    def __init__(
        self,
        *,
        vocab_tokens: int,
        slots: int,
        device: torch.device,
        grammar: GrammarFactory | None,
        entropy: bytes | None = None,
        weigh: Weigh = token_weights.reference,
        find: scan.LikeliestRows = argmax_rows.reference,
        draw_all: DrawRows = draw_rows.reference,
        waits: HostWaits | None = None,
    ) -> None:
        self._vocab_tokens = vocab_tokens
        self._grammars = grammar
        self._entropy = secrets.token_bytes(32) if entropy is None else entropy
        self._weigh = weigh
        self._find = find
        self._draw_all = draw_all
        self.waits = waits or HostWaits()
        self._device = device
        # A compiled backend compiles on its first call; no request should wait for that.
        weigh(*(torch.ones(shape, device=device) for shape in ((1, vocab_tokens), (1,), (1,))))
        scan.likeliest(torch.ones((1, vocab_tokens), device=device), find)
        self._table = SlotTable(slots, vocab_tokens)
        self._on_device = DeviceTable(slots, device)
        self._draw_first(device)
        self._history = History(torch.empty(slots, 0, dtype=torch.int32, device=device))

    def admit(
        self,
        slot: int,
        *,
        request_id: str,
        params: SamplingParams,
        sibling: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        prompt_tokens: int,
        output_ids: Sequence[int],
    ) -> None:
        """Take a request into a slot.

        output_ids are tokens generated before a preemption; the grammar goes on after them. A grammar
        that cannot be used is reported by `sample`, as an error of the request's rows.
        """
        seed = seed_of(request_id, self._entropy) if params.seed is None else params.seed
        grammar, error = None, ""
        try:
            grammar = self._grammar(params, stop_ids, output_ids)
        except GrammarError as refused:
            error = str(refused)
        self._table.set(
            slot,
            params,
            key=request_key(seed, sibling),
            prompt_tokens=prompt_tokens,
            stop_ids=stop_ids,
            grammar=grammar,
            error=error,
        )
        self._on_device.set(slot, self._table)

    def _draw_first(self, device: torch.device) -> None:
        """Launch a draw where draws are launched, so that the first request does not wait for compiling."""
        scores = torch.ones((1, self._vocab_tokens), device=device)
        if not scan.is_on_host(scores):
            first = torch.zeros(1, dtype=torch.int32, device=device)
            self._draw_all(scores, self._on_device.rows, first, first)

    def wants_likeliest(self, slots: Int32s) -> bool:
        """Whether all these requests want the likeliest token and nothing else."""
        return bool(self._table.plain[slots].all())

    def release(self, slot: int) -> None:
        """Forget the request in a slot."""
        self._table.clear(slot)

    def sample(
        self,
        logits: Tensor,
        slots: Int32s,
        positions: Int32s,
        history: Tensor,
        on_device: tuple[Tensor, Tensor] | None = None,
    ) -> Sampled:
        """Choose a token per row.

        logits: [rows, vocab] float32 or bfloat16, may be changed in place. slots: [rows] int32, no slot twice.
        positions: [rows] int32, tokens so far, which is the index of the one to be sampled.
        history: [slots, max_len] int32 on the device; history[slot, :position] are the tokens so far.
        on_device: slots and positions on the logits' device; they are copied there where they are None.
        """
        assert logits.shape == (len(slots), self._vocab_tokens), f"logits are {logits.shape}"
        logits = logits.contiguous()
        if self.wants_likeliest(slots):
            return self._plainly(logits)
        logits = logits.float()
        rows = Rows(self._table, slots, positions, on_device)
        scored = np.flatnonzero(self._table.logprobs[slots] >= 0)
        raw = _copied(logits, scored) if scored.size else logits[:0]
        errors = {
            row: rows.extras(row).error
            for row in np.flatnonzero(self._table.has_error[slots]).tolist()
        }
        constrained = np.flatnonzero(self._table.has_grammar[slots]).tolist()
        # What waits for the device anyway looks at the peaks at once.
        looks = scan.is_on_host(logits) or bool(constrained) or scored.size > 0
        if constrained:
            # A mask could hide bad scores.
            self._note_bad_peaks(_copied(logits, np.array(constrained)), errors, constrained)

        self._history.token_ids = history
        for stage in STAGES:
            stage(logits, rows, self._history)
        token_ids, peaks = self._choose(logits, rows, errors, looks)
        finished = self._advance_grammars(token_ids, rows, constrained, errors)

        for row in errors:
            token_ids[row] = HARMLESS_ID
        return Sampled(
            token_ids=token_ids.int(),
            peaks=None if looks else peaks,
            logprobs=self._score(raw, token_ids, rows, scored, errors),
            errors=errors,
            finished=finished,
        )

    def _plainly(self, logits: Tensor) -> Sampled:
        """The likeliest token of every row, found in one look at the scores."""
        token_ids, peaks = scan.likeliest(logits, self._find)
        errors: dict[int, str] = {}
        if scan.is_on_host(logits):
            errors = bad_peaks(peaks.numpy())
            for row in errors:
                token_ids[row] = HARMLESS_ID
        return Sampled(
            token_ids=token_ids.int(),
            peaks=None if scan.is_on_host(logits) else peaks,
            logprobs=(None,) * logits.shape[0],
            errors=errors,
            finished=frozenset(),
        )

    def prompt_logprobs(self, logits: Tensor, target_ids: Tensor, top: int) -> list[TokenLogprobs]:
        """Score prompt tokens: row i of logits [rows, vocab] scores target_ids[i], with `top` others."""
        tops = [top] * logits.shape[0]
        return score(logits, target_ids.to(logits.device), tops, self._weigh, self._read)

    def _read(self, tensor: Tensor) -> np.ndarray:
        """A tensor's numbers on the host; a wait, and counted as one, where it is on a device."""
        if tensor.device.type == "cpu":
            return tensor.numpy()
        return self.waits.wait(lambda: tensor.cpu().numpy())

    def _grammar(
        self, params: SamplingParams, stop_ids: frozenset[int], output_ids: Sequence[int]
    ) -> GrammarState | None:
        if params.structured is None:
            return None
        if self._grammars is None:
            raise GrammarError("structured output is not available: the model has no tokenizer")
        return self._grammars.start(
            params.structured,
            stop_ids=stop_ids,
            client_stop_ids=frozenset(params.stop_token_ids),
            output_ids=output_ids,
        )

    def _choose(
        self, logits: Tensor, rows: Rows, errors: dict[int, str], looks: bool
    ) -> tuple[Tensor, Tensor]:
        """A token per row, [rows] int64, and the peaks; `looks` adds rows with unusable scores to errors."""
        greedy = self._table.greedy[rows.slots]
        if greedy.all():
            token_ids, peaks = scan.likeliest(logits, self._find)
            if looks:
                self._note_bad_peaks(logits, errors, peaks=peaks)
            return token_ids, peaks
        if not scan.is_on_host(logits):
            every = np.arange(len(greedy))
            token_ids, peaks = self._draw_all(
                logits, self._on_device.rows, *rows.places(every, self._device)
            )
            if looks:
                self._note_bad_peaks(logits, errors, peaks=peaks)
            return token_ids, peaks
        peaks = logits.amax(dim=1)
        if looks:
            self._note_bad_peaks(logits, errors, peaks=peaks)
        drawn = ~greedy
        drawn[list(errors)] = False
        token_ids = torch.full((len(greedy),), HARMLESS_ID)
        for chosen, choose in ((greedy, self._choose_likeliest), (drawn, self._choose_at_random)):
            at = np.flatnonzero(chosen)
            if at.size == len(greedy):
                return choose(logits, peaks, rows, at), peaks
            if at.size:
                index = torch.from_numpy(at)
                part = logits.index_select(0, index)
                token_ids[index] = choose(part, peaks[index], rows, at)
        return token_ids, peaks

    def _choose_likeliest(self, logits: Tensor, peaks: Tensor, rows: Rows, at: Int64s) -> Tensor:
        return scan.likeliest(logits, self._find)[0]

    def _choose_at_random(self, logits: Tensor, peaks: Tensor, rows: Rows, at: Int64s) -> Tensor:
        table, slots = self._table, rows.slots[at]
        asked = Draw(
            temperature=table.temperature[slots],
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            min_p=table.min_p[slots],
            uniforms=uniforms(table.key[slots], rows.positions[at]),
        )
        return draw(logits, peaks, asked, self._weigh)

    def _note_bad_peaks(
        self,
        scores: Tensor,
        errors: dict[int, str],
        rows: Sequence[int] | None = None,
        *,
        peaks: Tensor | None = None,
    ) -> None:
        """Look at the peaks of these scores, which are those of `rows`, and add errors for what is bad."""
        found = bad_peaks(self._read(scores.amax(dim=1) if peaks is None else peaks))
        for at, reason in found.items():
            errors.setdefault(at if rows is None else rows[at], reason)

    def _advance_grammars(
        self, token_ids: Tensor, rows: Rows, constrained: list[int], errors: dict[int, str]
    ) -> frozenset[int]:
        """Tell the grammars their tokens."""
        finished: set[int] = set()
        chosen = self._read(token_ids).tolist() if constrained else []
        for row in constrained:
            grammar = rows.grammar(row)
            if row not in errors:
                grammar.accept(chosen[row])
            if grammar.error:
                errors[row] = f"the grammar cannot go on: {grammar.error}"
            elif row not in errors and grammar.complete:
                finished.add(row)
        return frozenset(finished)

    def _score(
        self, raw: Tensor, token_ids: Tensor, rows: Rows, scored: Int64s, errors: dict[int, str]
    ) -> tuple[TokenLogprobs | None, ...]:
        entries: list[TokenLogprobs | None] = [None] * len(rows.slots)
        kept = [at for at, row in enumerate(scored.tolist()) if row not in errors]
        if len(kept) < scored.size:
            raw = raw[staged(np.array(kept, np.int64), raw.device)]
        if kept:
            asked = scored[kept]
            tops = self._table.logprobs[rows.slots[asked]].tolist()
            chosen = token_ids[staged(asked, token_ids.device)]
            found = score(raw, chosen, tops, self._weigh, self._read)
            for row, entry in zip(asked.tolist(), found, strict=True):
                entries[row] = entry
        return tuple(entries)


def bad_peaks(peaks: np.ndarray) -> dict[int, str]:
    """Rows whose highest score is not a number, with the reason; a NaN is always the highest."""
    return {
        row: "no token is allowed: every one is ruled out"
        if peaks[row] == -np.inf
        else f"the model's scores hold {peaks[row]}"
        for row in np.flatnonzero(~np.isfinite(peaks)).tolist()
    }


def _copied(logits: Tensor, rows: Int64s) -> Tensor:
    """Some rows, safe from the stages."""
    if rows.size == logits.shape[0]:
        return logits.clone()
    return logits.index_select(0, staged(rows, logits.device))
