"""Why did each field of a config get its value? Collected as decisions are made, printed by `tokamak doctor`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

from tokamak.config.engine import Reason

T = TypeVar("T")

AUTO: Literal["auto"] = "auto"


@dataclass(slots=True)
class Reasons:
    """The reasons so far, in the order of the decisions."""

    lines: list[Reason] = field(default_factory=list[Reason])

    def pick(self, name: str, asked: T | Literal["auto"], auto: T, why: str) -> T:
        """The asked value, or the automatic one with its reason."""
        if asked == AUTO:
            return self.note(name, auto, why)
        return self.note(name, asked, "asked for")

    def note(self, name: str, value: T, why: str) -> T:
        """Write a decision down and hand it on."""
        self.lines.append(Reason(field=name, value=str(value), why=why))
        return value


def size(count: int) -> str:
    """Bytes for a person: 98.4 MiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"
