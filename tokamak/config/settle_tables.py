"""Where do tables of n-grams lie? On the device where it has room for them, else on the host.

A step reads a few rows of them, so a GPU may read these from the host's pinned memory, and a CPU from the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokamak.config.engine import ModelFacts
from tokamak.config.options import EngineOptions
from tokamak.config.reasons import AUTO, Reasons, size
from tokamak.device.facts import DeviceFacts
from tokamak.errors import OptionError

Place = Literal["device", "host"]

ROOM_SHARE = 0.5
"""Of what memory_fraction leaves beside the other weights and a step: the most that tables take of a GPU unasked."""
HOST_SHARE = 0.9
"""Of the host's memory: the most that is pinned for tables."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Where tables lie, and what they take."""

    place: Place
    weight_bytes: int
    """What they add to the weights that memory_fraction covers."""
    host_bytes: int
    """What they take beside: pinned for a GPU, for a CPU pages of the mapped file."""


def settle_tables(
    options: EngineOptions,
    facts: DeviceFacts,
    model: ModelFacts,
    *,
    room_bytes: int,
    reasons: Reasons,
) -> Tables:
    """The place of a model's tables.

    Args:
        options: what was asked.
        facts: the device the model runs on.
        model: what the checkpoint says of itself.
        room_bytes: what memory_fraction leaves beside the other weights and a step.
        reasons: where the choice is written down.

    Raises:
        OptionError: they are to lie on the host, which has not enough memory to pin.
    """
    count, asked = model.table_bytes, options.engram_tables
    unasked, why = _place(options, facts, count, room_bytes)
    place: Place = unasked if asked == AUTO else asked
    reasons.note("engram_tables", place, why if asked == AUTO else "asked for")
    has_file = facts.vendor == "cpu" and options.load_format == "auto"
    if not count or place == "device" or (facts.vendor == "cpu" and not has_file):
        return Tables(place, count, 0)
    if not has_file and count > facts.host_bytes * HOST_SHARE:
        raise _refused(options, facts, count, room_bytes)
    return Tables(place, 0, count)


def _place(
    options: EngineOptions, facts: DeviceFacts, count: int, room_bytes: int
) -> tuple[Place, str]:
    """Where they lie if nothing is asked, and why."""
    if not count:
        return "device", "the model has none"
    if facts.vendor == "cpu":
        if options.load_format == "random":
            return "device", "random tables have no file to be mapped"
        return "host", "a CPU reads their rows where the checkpoint is mapped"
    if count <= room_bytes * ROOM_SHARE:
        return "device", f"their {size(count)} leave the cache half of the device's room or more"
    return "host", f"their {size(count)} would leave the cache less than half of the device's room"


def _refused(
    options: EngineOptions, facts: DeviceFacts, count: int, room_bytes: int
) -> OptionError:
    asked = options.engram_tables
    also = ""
    if asked == AUTO:
        also = f", and more than half of the {size(max(room_bytes, 0))} that the device has for them and the cache"
    return OptionError(
        f"engram_tables is {asked}, and the model's tables of n-grams take {size(count)}: more than {HOST_SHARE} of "
        f"this machine's {size(facts.host_bytes)} of memory, which a GPU could read them from{also}",
        hint="use a machine with more memory, or engram_tables=device where the device can hold them",
    )
