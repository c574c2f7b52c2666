"""How did the step before this one end, for the requests of this one?

The answer is on its way from the device while this step is prepared. It may be taken once, and only after this
step's fill is launched: until then everything must be independent of it, and the device has work to do.
"""

from __future__ import annotations

import numpy as np

from tokamak.core.plan import Int32s, StepPlan
from tokamak.errors import StatusTakenTwice, StatusTooEarly
from tokamak.runner.dummy import NULL_SLOT
from tokamak.runner.results import InFlightResult
from tokamak.runner.status import NO_ROW, PrevStatus

_NOTHING = np.zeros(0, dtype=np.int32)


class Previous:
    """Holds the step in flight until the next one asks; `slots` counts the null slot."""

    def __init__(self, slots: int) -> None:
        self._row_of_slot = np.full(slots, NO_ROW, dtype=np.int32)
        self._in_flight: InFlightResult | None = None
        self._is_launched = False
        self._taken_by: StepPlan | None = None

    def put(self, plan: StepPlan, in_flight: InFlightResult) -> None:
        """A step was launched; the next one is prepared from here on."""
        self._row_of_slot.fill(NO_ROW)
        self._row_of_slot[plan.slots] = np.arange(plan.scheduled_requests, dtype=np.int32)
        self._row_of_slot[NULL_SLOT] = NO_ROW
        self._in_flight = in_flight
        self._is_launched = False
        self._taken_by = None

    def begin(self) -> None:
        """Another step is being prepared."""
        self._is_launched = False

    def launched(self) -> None:
        """The fill of the step under preparation is launched: its inputs are out of the way."""
        self._is_launched = True

    def take(self, plan: StepPlan) -> tuple[PrevStatus, Int32s]:
        """Wait for the previous step's verdict; also each request's row in it, int32 [requests].

        The row is NO_ROW for requests that were not in that step, a new one in a used slot included.

        Raises:
            StatusTooEarly: this step's fill is not launched.
            StatusTakenTwice: this step has taken it already.
        """
        if self._taken_by is plan:
            raise StatusTakenTwice(
                f"step {plan.seq} takes the previous status twice",
                hint="take it once and hand it on",
            )
        if not self._is_launched:
            raise StatusTooEarly(
                f"step {plan.seq} reads the previous status before its inputs are launched",
                hint="stage, publish and fill first; none of them may depend on the status",
            )
        self._is_launched = False
        self._taken_by = plan
        return self._status(), self._rows(plan)

    def _status(self) -> PrevStatus:
        if self._in_flight is None:
            return PrevStatus(accepted=_NOTHING, rejected=_NOTHING, next_token=_NOTHING)
        return self._in_flight.status()

    def _rows(self, plan: StepPlan) -> Int32s:
        rows = self._row_of_slot[plan.slots]
        if plan.admissions:
            admitted = [admission.slot for admission in plan.admissions]
            rows[np.isin(plan.slots, admitted)] = NO_ROW
        return rows
