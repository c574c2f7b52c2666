"""Which form is fastest here? A short measurement at the first start, kept for the next ones.

One weight of a typical shape is packed in every form that may be used and multiplied with 1, 8, 32 and
128 rows, on one thread, in processor time: other programs that want the same cores slow every form
alike and cannot turn the answer round. The answer lies in the cache folder under the processor and the versions; it
is read again at the next start and shown by `tokamak doctor`.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokamak.core.weight import GROUP_COLUMNS, DenseWeight, GroupedWeight, Weight
from tokamak.device.facts import DeviceFacts
from tokamak.ops.cache_folder import cache_folder
from tokamak.ops.linear.forms import PackedLinear

logger = logging.getLogger(__name__)

PROBE_ROWS = (1, 8, 32, 128)
PROBE_SHAPE = (1536, 1024)
REPEATS = 3
EVICT_NUMBERS = 12 * 1024 * 1024
"""float32 numbers read between two measurements, so that weights come from memory as in a model."""
WORTH = 1.25
"""A second form must be this much faster at many rows to be worth its memory."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a kind of weight: the forms by name, and the milliseconds behind it."""

    few: str
    many: str
    border_rows: int
    """Rows up to which `few` is used."""
    why: str


Maker = Callable[[Weight], PackedLinear]


def choose_forms(
    makers: Mapping[str, Maker], kind: str, *, dtype: torch.dtype, facts: DeviceFacts
) -> Choice:
    """The fastest of some forms for weights of a kind (`q4`, `q8` or `dense`), for rows of `dtype`."""
    names = sorted(makers)
    if len(names) == 1:
        return Choice(names[0], names[0], 0, "the only form here")
    key = "; ".join([facts.name, f"torch {torch.__version__}", f"{dtype}", kind, "+".join(names)])
    path = cache_folder() / "linear-forms.json"
    kept = _read(path)
    if key not in kept:
        kept[key] = _measure(makers, kind, dtype)
        _write(path, kept)
    return pick(kept[key])


def pick(times: Mapping[str, Sequence[float]]) -> Choice:
    """Choose from milliseconds by form, one per PROBE_ROWS."""
    few = min(times, key=lambda name: times[name][0])
    many = min(times, key=lambda name: times[name][-1])
    shown = ", ".join(
        f"{name} " + "/".join(f"{ms:.2f}" for ms in times[name]) for name in sorted(times)
    )
    why = f"ms at {'/'.join(map(str, PROBE_ROWS))} rows: {shown}"
    if few == many or times[few][-1] < times[many][-1] * WORTH:
        return Choice(few, few, 0, why)
    border = 1
    for rows, of_few, of_many in zip(PROBE_ROWS, times[few], times[many], strict=True):
        if of_few > of_many:
            break
        border = rows
    return Choice(few, many, border, why)


def _measure(makers: Mapping[str, Maker], kind: str, dtype: torch.dtype) -> dict[str, list[float]]:
    """Milliseconds by form and row count: the best of a few calls, forms taking turns."""
    generator = torch.Generator().manual_seed(0)
    weight = probe_weight(kind, generator)
    packed = {name: make(weight) for name, make in makers.items()}
    evict = torch.zeros(EVICT_NUMBERS)
    times: dict[str, list[float]] = {name: [] for name in packed}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for rows in PROBE_ROWS:
            x = torch.randn((rows, PROBE_SHAPE[1]), generator=generator).to(dtype)
            best = dict.fromkeys(packed, float("inf"))
            for _ in range(REPEATS):
                for name, form in packed.items():
                    best[name] = min(best[name], _time(form, x, evict if rows == 1 else None))
            for name, seconds in best.items():
                times[name].append(round(seconds * 1e3, 4))
    finally:
        torch.set_num_threads(threads)
    return times


def probe_weight(kind: str, generator: torch.Generator) -> Weight:
    """A random weight of a kind."""
    features, columns = PROBE_SHAPE
    if kind == "dense":
        return DenseWeight(torch.randn(PROBE_SHAPE, generator=generator))
    bits = 4 if kind == "q4" else 8
    codes = torch.randint(0, 1 << bits, PROBE_SHAPE, dtype=torch.uint8, generator=generator)
    scales = torch.full((features, columns // GROUP_COLUMNS), 2.0**-8)
    return GroupedWeight(codes, scales, -(2.0 ** (bits - 1)) * scales, bits)


def _time(form: PackedLinear, x: Tensor, evict: Tensor | None) -> float:
    if evict is not None:
        evict.sum()
    begun = time.thread_time()
    form(x)
    return time.thread_time() - begun


def _read(path: Path) -> dict[str, dict[str, list[float]]]:
    """What was measured before; a file that cannot be read is measured anew."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _write(path: Path, kept: Mapping[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(kept, file, indent=1)
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("measured forms could not be kept in %s: %s", path, error)
