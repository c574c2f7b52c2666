"""How does a step divide for attention? Into a prefill half and a decode half over one row space.

Each half is prepared with its own real sizes; a token graph's padding lies behind both and belongs to none. In a
decode step padded to a bucket the padding requests belong to the decode half: they read the null block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokamak.core.inputs import AttnHalf, AttnStep, StepInputs
from tokamak.core.plan import Int32s, Mode, StepPlan, StepShape


class AttnBuilder:
    """Makes the AttnStep of a step. `widths` are the query widths decode rows may have."""

    def __init__(
        self,
        device: torch.device,
        *,
        max_requests: int,
        max_model_len: int,
        widths: tuple[int, ...],
    ) -> None:
        self._max_model_len = max_model_len
        rows = torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        self._uniform_starts: dict[int, Tensor] = {width: rows * width for width in widths}
        self._recorded: dict[tuple[int, int], AttnStep] = {}
        """The steps of request buckets, by request and token rows: nothing else of a plan is in them."""

    def prepare(
        self, plan: StepPlan, shape: StepShape, inputs: StepInputs, rejected: Int32s | None
    ) -> AttnStep:
        """The halves of a step: prefill rows, decode rows, or both.

        rejected: int32 [requests], tokens of the plan's lengths that the step before did not accept; None where
        nobody waited for them, and the plan's lengths are upper bounds.
        """
        prefill_requests = plan.prefill_rows
        if not prefill_requests and shape.mode is Mode.REQUEST_GRAPH:
            return self._recorded_decode(shape)
        lengths = plan.lengths if rejected is None else plan.lengths - rejected
        if not prefill_requests:
            # Beside a peer that prefills, rows are not padded as requests: the bucket's end belongs to nobody.
            beside = shape.q_width == 0
            decode = self.prepare_decode(
                first_request=0,
                first_token=0,
                running_requests=plan.scheduled_requests if beside else shape.running_requests,
                running_tokens=plan.scheduled_tokens if beside else shape.running_tokens,
                longest_tokens=int(lengths.max()),
            )
            return AttnStep(prefill=None, decode=decode)
        prefill_tokens = int(plan.query_lens[:prefill_requests].sum(dtype=np.int64))
        if prefill_requests == plan.scheduled_requests:
            prefill = self.prepare_prefill(
                running_requests=prefill_requests,
                running_tokens=prefill_tokens,
                query_starts=inputs.query_starts,
                longest_tokens=int(lengths.max()),
            )
            return AttnStep(prefill=prefill, decode=None)
        return self.prepare_mixed(
            prefill_requests=prefill_requests,
            prefill_tokens=prefill_tokens,
            decode_requests=plan.scheduled_requests - prefill_requests,
            decode_tokens=shape.scheduled_tokens - prefill_tokens,
            query_starts=inputs.query_starts,
            longest_prefill_tokens=int(lengths[:prefill_requests].max()),
            longest_decode_tokens=int(lengths[prefill_requests:].max()),
        )

    def _recorded_decode(self, shape: StepShape) -> AttnStep:
        """A step that replays a request bucket: padding requests included, and as long as any can be."""
        size = (shape.running_requests, shape.running_tokens)
        if size not in self._recorded:
            decode = self.prepare_decode(
                first_request=0,
                first_token=0,
                running_requests=shape.running_requests,
                running_tokens=shape.running_tokens,
                longest_tokens=self._max_model_len,
            )
            self._recorded[size] = AttnStep(prefill=None, decode=decode)
        return self._recorded[size]

    def prepare_prefill(
        self,
        *,
        running_requests: int,
        running_tokens: int,
        query_starts: Tensor,
        longest_tokens: int,
    ) -> AttnHalf:
        """Rows whose query counts differ. query_starts: int32 [at least running_requests + 1]."""
        return AttnHalf(
            first_request=0,
            last_request=running_requests,
            first_token=0,
            last_token=running_tokens,
            q_width=0,
            query_starts=query_starts[: running_requests + 1],
            longest_tokens=longest_tokens,
        )

    def prepare_decode(
        self,
        *,
        first_request: int,
        first_token: int,
        running_requests: int,
        running_tokens: int,
        longest_tokens: int,
    ) -> AttnHalf:
        """Rows of one width."""
        q_width, rest = divmod(running_tokens, running_requests)
        assert not rest, f"{running_tokens} tokens of {running_requests} decode rows"
        assert q_width in self._uniform_starts, f"decode rows of {q_width} tokens"
        return AttnHalf(
            first_request=first_request,
            last_request=first_request + running_requests,
            first_token=first_token,
            last_token=first_token + running_tokens,
            q_width=q_width,
            query_starts=self._uniform_starts[q_width][: running_requests + 1],
            longest_tokens=longest_tokens,
        )

    def prepare_mixed(
        self,
        *,
        prefill_requests: int,
        prefill_tokens: int,
        decode_requests: int,
        decode_tokens: int,
        query_starts: Tensor,
        longest_prefill_tokens: int,
        longest_decode_tokens: int,
    ) -> AttnStep:
        """First the prefill half, then the decode half, each with its real sizes."""
        return AttnStep(
            prefill=self.prepare_prefill(
                running_requests=prefill_requests,
                running_tokens=prefill_tokens,
                query_starts=query_starts,
                longest_tokens=longest_prefill_tokens,
            ),
            decode=self.prepare_decode(
                first_request=prefill_requests,
                first_token=prefill_tokens,
                running_requests=decode_requests,
                running_tokens=decode_tokens,
                longest_tokens=longest_decode_tokens,
            ),
        )
