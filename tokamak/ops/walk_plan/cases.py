"""Steps to be walked: the kinds a plan can go wrong at, random ones, and rows in several bands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tokamak.ops.case import Case
from tokamak.ops.walk_plan.host import Ints, walk_plan_reference
from tokamak.ops.walk_plan.sizes import FIELDS, PIECE_ROWS, piece_room

Int32s = npt.NDArray[np.int32]
KEEP = 512
WALK_CHANGED = (6,)


@dataclass(frozen=True, slots=True)
class WalkStep:
    """Requests of so many rows, and the position of every row."""

    lens: tuple[int, ...]
    positions: Int32s
    programs: int
    q_width: int = 0
    ratio: int = 1
    keep: int = KEEP
    band_rows: int = 1 << 20

    @property
    def requests(self) -> Int32s:
        """The request of every row."""
        return np.repeat(np.arange(len(self.lens), dtype=np.int32), self.lens)

    @property
    def bounds(self) -> Int32s:
        """How many keys every row sees."""
        return (self.positions + 1) // self.ratio

    def make(self) -> tuple[object, ...]:
        """Arguments of `fill_walk_plan`; what it writes holds stale numbers."""
        tokens = len(self.positions)
        bands = max(1, -(-tokens // self.band_rows))
        return (
            torch.tensor([0, *self.lens]).cumsum(0).int(),
            torch.from_numpy(self.positions.copy()),
            self.q_width,
            self.ratio,
            self.keep,
            self.band_rows,
            torch.full((bands, self.programs, FIELDS), 77, dtype=torch.int32),
        )


def uniform(bounds: list[int], programs: int, *, q_width: int = 1, **other: int) -> WalkStep:
    """Decode rows, `q_width` of each request, of which the last sees so many keys."""
    last = np.array(bounds, dtype=np.int32) * other.get("ratio", 1) - 1
    rows = last[:, None] - np.arange(q_width - 1, -1, -1, dtype=np.int32)
    positions = rows.reshape(-1).clip(0).astype(np.int32)
    return WalkStep((q_width,) * len(bounds), positions, programs, q_width, **other)


SPECIAL = {
    "no rows": WalkStep((), np.zeros(0, dtype=np.int32), 16),
    "one row": uniform([70_000], 16),
    "one row of few keys": uniform([KEEP + 1], 16),
    "all see what they keep": uniform([KEEP, 3, 1, 511], 16),
    "all equal": uniform([4_096] * 7, 16),
    "one long among many short": uniform([900] * 12 + [500_000] + [700] * 3, 32),
    "as many pieces as fit": uniform([600 + 97 * at for at in range(15)], 16),
    "as many pieces of drafts as fit": uniform([9_000] * 15, 16, q_width=PIECE_ROWS),
    "drafts of two pieces": uniform([9_000, 514, 300], 16, q_width=8),
    "entries of four tokens": uniform([5_000, 600, 513, 12], 16, ratio=4),
    "chunk edges": uniform([127, 128, 129, 255, 256, 257], 16, keep=127),
    "rows in bands": uniform([3_000, 200, 9_000, 1_500, 640], 16, q_width=3, band_rows=4),
}
"""By name."""


def random_step(chance: np.random.Generator) -> WalkStep:
    """A step of a random kind: few or many requests of one width or several, among them without rows."""
    q_width = int(chance.choice([0, 1, 1, 2, 6, 7]))
    requests = int(chance.integers(0, 24))
    lens = np.full(requests, q_width) if q_width else chance.integers(0, 15, requests)
    tokens, ratio = int(lens.sum()), int(chance.choice([1, 2, 4]))
    longest = ratio * int(chance.choice([200, 1_000, 5_000, 300_000]))
    positions = chance.integers(0, longest, tokens)
    if chance.random() < 0.3:
        # Most see few keys.
        positions = np.where(chance.random(tokens) < 0.8, positions // 50, positions)
    room = piece_room(requests, tokens, q_width)
    return WalkStep(
        tuple(lens.tolist()),
        positions.astype(np.int32),
        programs=room + int(chance.choice([1, 1, 2, 9, 40])),
        q_width=q_width,
        ratio=ratio,
        keep=int(chance.choice([0, 5, 128, KEEP])),
        band_rows=1 + tokens // int(chance.choice([1, 1, 3])),
    )


def random_steps(count: int) -> list[WalkStep]:
    """The special steps, and random ones up to a count."""
    chance = np.random.default_rng(19)
    special = list(SPECIAL.values())
    return special + [random_step(chance) for _ in range(count - len(special))]


def specified_plans(step: WalkStep) -> Ints:
    """What `fill_walk_plan` must write for a step: int32 [bands, programs, 4], rows counted from the step's first."""
    plans: list[Ints] = []
    for first in range(0, max(len(step.positions), 1), step.band_rows):
        band = slice(first, first + step.band_rows)
        plan = walk_plan_reference(step.requests[band], step.bounds[band], step.programs, step.keep)
        plan[plan[:, 1] > 0, 0] += first
        plans.append(plan)
    return np.stack(plans)


fill_walk_plan_cases = [
    Case(name, partial(WalkStep.make, step), 0.0, WALK_CHANGED) for name, step in SPECIAL.items()
]
