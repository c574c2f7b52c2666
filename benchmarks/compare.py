"""Has something become slower? Compares the medians of a new record with those of a stored one.

    python -m benchmarks.compare NEW.json STORED.json [--most 15] [--only preparation]

Every `median` in a record is a time. Fails if one has grown by more than `--most` percent, or is missing. Records of
different devices are not compared.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_PERCENT = 15.0


@dataclass(frozen=True, slots=True)
class Change:
    """A median then and now; None where the new record has none."""

    name: str
    stored: float
    new: float | None

    @property
    def percent(self) -> float | None:
        """How much it has grown."""
        return None if self.new is None else 100.0 * (self.new / self.stored - 1.0)

    def is_worse(self, most_percent: float) -> bool:
        """Whether it has grown too much, or is gone."""
        return self.percent is None or self.percent > most_percent

    def __str__(self) -> str:
        now = "missing" if self.new is None else f"{self.new:.1f}"
        grown = "" if self.percent is None else f"{self.percent:+7.1f} %"
        return f"{self.name:<44}{self.stored:>12.1f}{now:>12}  {grown}"


def medians(record: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Every median of a record, by its place in it."""
    if isinstance(record, dict):
        for name, value in record.items():
            if name == "median":
                yield path, float(value)
            else:
                yield from medians(value, f"{path}/{name}" if path else name)
    elif isinstance(record, list):
        for at, value in enumerate(record):
            yield from medians(value, f"{path}/{at}")


def compare(new: object, stored: object, only: str = "") -> list[Change]:
    """The medians of the stored record whose name has the pattern `only` in it, then and now."""
    now = dict(medians(new))
    return [
        Change(name, value, now.get(name))
        for name, value in medians(stored)
        if re.search(only, name)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; 1 if something has become slower, 2 if there is nothing to compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("new", type=Path)
    parser.add_argument("stored", type=Path)
    parser.add_argument("--most", type=float, default=MOST_PERCENT, help="percent")
    parser.add_argument("--only", default="", help="a pattern of names")
    asked = parser.parse_args(arguments)
    new, stored = (
        json.loads(path.read_text(encoding="utf-8")) for path in (asked.new, asked.stored)
    )
    devices = [record.get("device", {}).get("name") for record in (new, stored)]
    if devices[0] != devices[1]:
        print(f"{asked.new.name} is of {devices[0]}, {asked.stored.name} of {devices[1]}")
        return 2
    changes = compare(new, stored, asked.only)
    if not changes:
        print(f"{asked.stored.name} has no median named like {asked.only!r}")
        return 2
    worse = [change for change in changes if change.is_worse(asked.most)]
    for change in changes:
        print(change, "  slower" if change in worse else "")
    print(f"{len(worse)} of {len(changes)} grew by more than {asked.most:g} %")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
