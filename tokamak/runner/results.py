"""What a step gave, on its way from the device to the host.

The copy of its tokens starts as soon as the step is launched, and with it that of the scores' peaks, which tell
whether they were usable. Whoever asks first, the preparation of the next step or the delivery, waits for it; the
other finds it there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tokamak.core.plan import Int32s, RowResult, StepPlan, StepResult, TokenLogprobs
from tokamak.device.waits import HostWaits
from tokamak.runner.status import NO_TOKEN, PrevStatus
from tokamak.sampling.sampler import HARMLESS_ID, Sampled, bad_peaks

NO_PLACE = -1
"""Of a row that samples nothing."""


class InFlightResult:
    """A launched step. `launch` makes one; any thread may read it.

    On a CPU a step has run when it is launched, so nothing is left to wait for and no wait is counted:
    who runs steps in another thread waits for that thread instead.
    """

    def __init__(
        self,
        plan: StepPlan,
        sampled: Sampled,
        prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]],
        *,
        token_ids: Tensor,
        peaks: Tensor | None = None,
        arrival: Callable[[], None] | None,
        waits: HostWaits,
    ) -> None:
        self.plan = plan
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs
        self._token_ids = token_ids
        self._peaks = peaks
        self._errors = sampled.errors
        self._arrival = arrival
        self._waits = waits
        self._lock = threading.Lock()

    @classmethod
    def launch(
        cls,
        plan: StepPlan,
        sampled: Sampled,
        prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]],
        waits: HostWaits,
    ) -> InFlightResult:
        """Start the copy of a step's tokens to the host, behind what is launched so far.

        prompt_logprobs: by request row, entries of the prompt positions this step scored.
        """
        token_ids, peaks, arrival = sampled.token_ids, sampled.peaks, None
        if token_ids.is_cuda:
            packed = sampled.packed
            if packed is None:
                bits = torch.zeros_like(token_ids) if peaks is None else peaks.view(torch.int32)
                packed = torch.stack((token_ids, bits), dim=1)
            host = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            event = torch.Event(token_ids.device)
            event.record()
            arrival = event.synchronize
            token_ids = host[:, 0]
            if peaks is not None:
                peaks = host[:, 1].view(torch.float32)
        elif sampled.packed is not None:
            # The next step overwrites what was chosen in a recording.
            token_ids = token_ids.clone()
            peaks = None if peaks is None else peaks.clone()
        return cls(
            plan,
            sampled,
            prompt_logprobs,
            token_ids=token_ids,
            peaks=peaks,
            arrival=arrival,
            waits=waits,
        )

    def arrive(self) -> Int32s:
        """The step's tokens, int32 [sampled]; waits for them the first time."""
        with self._lock:
            if self._arrival is not None:
                self._waits.wait(self._arrival)
                self._arrival = None
            if self._peaks is not None:
                bad = bad_peaks(self._peaks.numpy())
                # Through NumPy, as the tensor was made in inference mode and this may be outside of it.
                self._token_ids.numpy()[list(bad)] = HARMLESS_ID
                self._errors = {**bad, **self._errors}
                self._peaks = None
        return self._token_ids.numpy()

    def status(self) -> PrevStatus:
        """How the step's rows ended; waits for that if nobody has."""
        plan, tokens = self.plan, self.arrive()
        nothing_drafted = np.zeros(plan.scheduled_requests, dtype=np.int32)
        next_token = np.full(plan.scheduled_requests, NO_TOKEN, dtype=np.int32)
        next_token[plan.sampled_rows] = tokens
        return PrevStatus(accepted=nothing_drafted, rejected=nothing_drafted, next_token=next_token)

    def take(self) -> StepResult:
        """The step's tokens row by row; waits for them if nobody has."""
        plan, sampled = self.plan, self._sampled
        token_ids = self.arrive().tolist()
        places = range(len(token_ids))
        if plan.prefill_rows:
            is_sampled = np.zeros(plan.scheduled_requests, dtype=np.bool_)
            is_sampled[plan.sampled_rows] = True
            places = np.where(is_sampled, is_sampled.cumsum() - 1, NO_PLACE).tolist()
        finished, errors, asked = sampled.finished, self._errors, self._prompt_logprobs
        rows: list[RowResult] = []
        for row, (request_id, at) in enumerate(zip(plan.request_ids, places, strict=True)):
            logprobs = None if at == NO_PLACE else sampled.logprobs[at]
            rows.append(
                RowResult(
                    request_id=request_id,
                    token_ids=() if at == NO_PLACE else (token_ids[at],),
                    logprobs=() if logprobs is None else (logprobs,),
                    prompt_logprobs=tuple(asked[row]) if row in asked else (),
                    complete=at in finished,
                    error=errors.get(at, ""),
                )
            )
        return StepResult(seq=plan.seq, rows=tuple(rows))
