"""Which tokens may follow in a text that is held to a grammar?

One `GrammarState` per request, made by the rank's `GrammarFactory`. Masks are NumPy arrays; the matching is
llguidance's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from tokamak.core.request import StructuredOutput
from tokamak.errors import GrammarError
from tokamak.sampling.grammar import compiled, shortened

Bools = npt.NDArray[np.bool_]

COMPILED_GRAMMARS: Final = 32
"""Grammars kept compiled, so that a schema sent again costs nothing."""


class GrammarState:
    """How far one request is in its grammar."""

    def __init__(
        self, matcher: LLMatcher, end_ids: frozenset[int], eos_ids: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._end_ids = np.array(sorted(end_ids), np.int64)
        self._eos_ids = np.array(sorted(eos_ids), np.int64)
        self._ends = end_ids | eos_ids
        self._ended = False

    @property
    def error(self) -> str:
        """Why the grammar cannot go on; empty while it can."""
        if not self._matcher.is_error():
            return ""
        return shortened(self._matcher.get_error()) or "the grammar engine stopped"

    @property
    def complete(self) -> bool:
        """Whether the text matches and nothing but an end may follow."""
        return self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def fill(self, allowed: Bools) -> None:
        """Write which tokens may come next. allowed: [vocab], contiguous.

        An end-of-sequence token is allowed where the text may end: one that ends this request, if it
        has any. A complete text allows nothing else.
        """
        if not self.complete:
            bits = np.zeros(-(-allowed.size // 32), np.int32)
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            allowed[:] = np.unpackbits(
                bits.view(np.uint8), count=allowed.size, bitorder="little"
            ).view(np.bool_)
            allowed[self._eos_ids] = False
            allowed[self._end_ids] = self._matcher.is_accepting()
            if self._matcher.is_error() or allowed.any():
                return
        allowed[:] = False
        allowed[self._end_ids if self._end_ids.size else self._eos_ids] = True

    def accept(self, token_id: int) -> None:
        """Go on by one token that `fill` allowed; `error` tells if that failed."""
        if token_id in self._ends and (self.complete or self._matcher.is_accepting()):
            self._ended = True
        elif not self._ended:
            self._matcher.consume_token(token_id)


class GrammarFactory:
    """Makes the grammar state of requests for one tokenizer."""

    def __init__(
        self, tokenizer_json: str, *, vocab_tokens: int, eos_ids: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_tokens = vocab_tokens
        self._eos_ids = eos_ids
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()

    @property
    def tokenizer(self) -> LLTokenizer:
        """The tokenizer as the grammar engine sees it, built on first use (a fraction of a second).

        Raises:
            GrammarError: it is of a kind the grammar engine cannot read.
        """
        if self._tokenizer is None:
            try:
                self._tokenizer = LLTokenizer(
                    self._tokenizer_json,
                    n_vocab=self._vocab_tokens,
                    eos_token=sorted(self._eos_ids) or None,
                )
            except ValueError as error:
                reason = shortened(str(error))
                raise GrammarError(
                    f"structured output is not available with this model's tokenizer: {reason}"
                ) from None
        return self._tokenizer

    def start(
        self,
        structured: StructuredOutput,
        *,
        stop_ids: frozenset[int] = frozenset(),
        client_stop_ids: frozenset[int] = frozenset(),
        output_ids: Sequence[int] = (),
    ) -> GrammarState:
        """The state after `output_ids`.

        stop_ids: every id that ends the request; client_stop_ids: those of them a client named. The
        rest are end-of-sequence ids, and so are client ids that are special tokens. Other client ids
        are ordinary text to the grammar.

        Raises:
            GrammarError: the constraint cannot be compiled for this tokenizer.
        """
        special = {i for i in client_stop_ids & stop_ids if self.tokenizer.is_special_token(i)}
        end_ids = (stop_ids - client_stop_ids) | special | (stop_ids & self._eos_ids)
        eos_ids = self._eos_ids or frozenset(self.tokenizer.eos_tokens)
        state = GrammarState(self._matcher(structured).deep_copy(), end_ids, eos_ids)
        for token_id in output_ids:
            state.accept(token_id)
        return state

    def _matcher(self, structured: StructuredOutput) -> LLMatcher:
        matcher = self._compiled.get(structured)
        if matcher is None:
            matcher = self._compiled[structured] = compiled(structured, self.tokenizer)
            if len(self._compiled) > COMPILED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(structured)
        return matcher
