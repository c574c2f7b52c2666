"""What are a step and its parts called in a profiler's trace?"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from tokamak.core.plan import Mode, StepPlan, StepShape
from tokamak.telemetry.spans import Spans


def step_label(shape: StepShape, plan: StepPlan) -> str:
    """Such as `decode[bs=3/4 tok=3/4 p=0 d=3]`: request rows and token rows, real / run, then by kind.

    Kinds are prefill, mixed, decode (recorded), eager_decode, and the same behind `dummy_`, which no
    search for real steps finds by its beginning.
    """
    decode_rows = plan.scheduled_requests - plan.prefill_rows
    if plan.prefill_rows:
        kind = "mixed" if decode_rows else "prefill"
    else:
        kind = "decode" if shape.mode is Mode.REQUEST_GRAPH else "eager_decode"
    dummy = "dummy_" if shape.dummy else ""
    return (
        f"{dummy}{kind}[bs={plan.scheduled_requests}/{shape.running_requests} "
        f"tok={plan.scheduled_tokens}/{shape.running_tokens} p={plan.prefill_rows} d={decode_rows}]"
    )


def step_range(plan: StepPlan, shape: StepShape) -> AbstractContextManager[object]:
    """A profiler range of the step's label while PyTorch's profiler runs; otherwise nothing."""
    if not _is_profiling():
        return _NO_RANGE
    return torch.profiler.record_function(step_label(shape, plan))


def profiled_spans() -> Spans:
    """A rank's timers, which are ranges `tokamak::stage` and so on while PyTorch's profiler runs."""
    return Spans(torch.profiler.record_function, _is_profiling)


_NO_RANGE = nullcontext()
_is_profiling = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
