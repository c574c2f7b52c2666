"""What does a profiler's trace say of the steps? Step times, host time by span, and how long the GPU was idle.

    python tools/step_report.py trace.json[.gz] [--discard 64] [--json]

Reads a Chrome trace of `torch.profiler`. A step is a range with a step label, such as `decode[bs=3/4 …]`; dummy
steps are left out. Times are microseconds. By kind of step:

- step: from a step's beginning to that of the next one;
- host: how long the host was in the step's range;
- GPU idle: from the end of the last kernel of the step before to the start of the step's first one, which is what the
  host's preparation of the step left the device without work. Kernels belong to the step that launched them;
- spans: host time in `tokamak::stage` and so on, per step. A span outside of all steps counts for the one before it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

STEP = re.compile(r"(prefill|mixed|decode|eager_decode)\[")
SPAN = "tokamak::"
RANGE = "user_annotation"
LAUNCHES = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
ALL = "all"

Event = Mapping[str, Any]
Row = dict[str, object]


class TraceError(Exception):
    """A file is not a trace, or has no step in it."""


@dataclass(slots=True)
class Step:
    """One step of a trace; times in microseconds."""

    kind: str
    begin: float
    end: float
    spans: dict[str, float] = field(default_factory=dict)
    first_kernel: float | None = None
    last_kernel_end: float | None = None

    def add_kernel(self, begin: float, end: float) -> None:
        """Count a piece of device work that this step launched."""
        self.first_kernel = begin if self.first_kernel is None else min(self.first_kernel, begin)
        last = self.last_kernel_end
        self.last_kernel_end = end if last is None else max(last, end)


def read_events(path: Path) -> list[Event]:
    """The events of a trace file, gzipped or not.

    Raises:
        TraceError: the file is not a Chrome trace.
    """
    data = path.read_bytes()
    try:
        trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        return trace["traceEvents"]
    except (json.JSONDecodeError, UnicodeDecodeError, gzip.BadGzipFile, KeyError, TypeError) as why:
        raise TraceError(f"{path.name} is not a Chrome trace: {why}") from why


def find_steps(events: Iterable[Event]) -> list[Step]:
    """The steps of a trace in order, with their spans and their kernels' first begin and last end.

    Raises:
        TraceError: no range has a step's label.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    steps = [
        Step(found[1], event["ts"], event["ts"] + event["dur"])
        for event in timed
        if event.get("cat") == RANGE and (found := STEP.match(event["name"]))
    ]
    if not steps:
        raise TraceError("no step in the trace: is it one of an engine that was profiled?")
    steps.sort(key=lambda step: step.begin)
    begins = [step.begin for step in steps]

    def step_of(time_us: float) -> Step | None:
        at = bisect_right(begins, time_us) - 1
        return steps[at] if at >= 0 else None

    launched: dict[object, Step] = {}
    for event in timed:
        if event.get("cat") == RANGE and event["name"].startswith(SPAN):
            step, name = step_of(event["ts"]), event["name"].removeprefix(SPAN)
            if step is not None:
                step.spans[name] = step.spans.get(name, 0.0) + event["dur"]
        elif event.get("cat") in LAUNCHES and "correlation" in event.get("args", {}):
            step = step_of(event["ts"])
            if step is not None and event["ts"] < step.end:
                launched[event["args"]["correlation"]] = step
    for event in timed:
        if event.get("cat") in DEVICE_WORK:
            step = launched.get(event.get("args", {}).get("correlation"))
            if step is not None:
                step.add_kernel(event["ts"], event["ts"] + event["dur"])
    return steps


def report(steps: Sequence[Step]) -> list[Row]:
    """One row for all steps and one per kind; times in microseconds, None where the trace has none."""
    pairs = list(pairwise(steps))
    rows: list[Row] = []
    for kind in (ALL, *sorted({step.kind for step in steps})):
        chosen = [step for step in steps if kind in (ALL, step.kind)]
        lengths = [after.begin - step.begin for step, after in pairs if kind in (ALL, step.kind)]
        idle = [
            max(0.0, after.first_kernel - step.last_kernel_end)
            for step, after in pairs
            if kind in (ALL, after.kind)
            and after.first_kernel is not None
            and step.last_kernel_end is not None
        ]
        names = sorted({name for step in chosen for name in step.spans})
        rows.append(
            {
                "kind": kind,
                "steps": len(chosen),
                "step_us": summary(lengths),
                "host_us": summary([step.end - step.begin for step in chosen]),
                "gpu_idle_us": summary(idle),
                "span_us": {
                    name: summary([step.spans.get(name, 0.0) for step in chosen]) for name in names
                },
            }
        )
    return rows


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Median, mean and 99th percentile (the smallest value that 99 % do not exceed)."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 2),
        "mean": round(statistics.fmean(ordered), 2),
        "p99": round(ordered[-(-99 * len(ordered) // 100) - 1], 2),
    }


def table(rows: Sequence[Row]) -> str:
    """The report as text."""
    lines: list[str] = []
    for row in rows:
        lines.append(f"{row['kind']}: {row['steps']} steps")
        parts: dict[str, object] = {
            "step": row["step_us"],
            "host": row["host_us"],
            "GPU idle": row["gpu_idle_us"],
        }
        spans = row["span_us"]
        assert isinstance(spans, dict)
        parts |= {f"  {name}": numbers for name, numbers in spans.items()}
        for name, numbers in parts.items():
            lines.append(f"  {name:<14}{_line(numbers)}")
    return "\n".join(lines)


def _line(numbers: object) -> str:
    if not isinstance(numbers, dict):
        return "not in the trace"
    return "   ".join(f"{name} {value:10.1f}" for name, value in numbers.items()) + "  µs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of a trace file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--discard", type=int, default=0, help="leave out so many first steps")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    asked = parser.parse_args(arguments)
    try:
        steps = find_steps(read_events(asked.trace))[asked.discard :]
    except (TraceError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if not steps:
        print(f"the trace has no more than {asked.discard} steps", file=sys.stderr)
        return 1
    rows = report(steps)
    print(json.dumps(rows, indent=2) if asked.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
