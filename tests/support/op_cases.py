"""Every op that has cases, found where they are kept, and how far two outcomes are apart."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tokamak.ops.case import Case, difference
from tokamak.ops.load import OP_PACKAGES
from tokamak.ops.registry import OPS, Op
from tokamak.ops.step_prep.cases import STEP_CHANGED, fill_step_cases, make_step, random_sizes
from tokamak.ops.walk_plan.cases import WALK_CHANGED, WalkStep, random_steps

RANDOM_STEPS = 60
WALKED_STEPS = 36


def ops_with_cases() -> list[tuple[Op[..., object], Sequence[Case]]]:
    """Ops and their cases: the lists of `ops/<package>/*cases.py` that are named after an op."""
    found: list[tuple[Op[..., object], Sequence[Case]]] = []
    for package in OP_PACKAGES:
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.endswith("cases"):
                continue
            named = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
            found += [
                (OPS[name.removesuffix("_cases")], cases)
                for name, cases in named.items()
                if name.endswith("_cases") and name.removesuffix("_cases") in OPS
            ]
    return found


def gap(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """`difference` of outcomes on any devices, where equal numbers, infinite ones too, and two NaNs have none.

    Caches hold NaN where nobody may read, and the highest logit may be one.
    """
    assert expected, "nothing is compared"
    pairs = [(a.cpu().double(), b.cpu().double()) for a, b in zip(found, expected, strict=True)]
    same = [(a == b) | (a.isnan() & b.isnan()) for a, b in pairs]
    return difference(
        [a.masked_fill(equal, 0.0) for (a, _), equal in zip(pairs, same, strict=True)],
        [b.masked_fill(equal, 0.0) for (_, b), equal in zip(pairs, same, strict=True)],
    )


def moved(arguments: Sequence[object], device: torch.device) -> tuple[object, ...]:
    """The arguments on a device, with their strides; views of one storage stay views of one."""
    storages: dict[int, Tensor] = {}

    def move(each: object) -> object:
        if not isinstance(each, Tensor):
            return each
        storage = each.untyped_storage()
        whole = torch.empty(0, dtype=each.dtype).set_(storage)
        base = storages.setdefault(storage._cdata, whole.to(device))
        return base.as_strided(each.shape, each.stride(), each.storage_offset())

    return tuple(move(each) for each in arguments)


def outcome_on(case: Case, call: Callable[..., object], device: torch.device) -> tuple[Tensor, ...]:
    """What a call on a device returns and what it leaves in the arguments it changes."""
    inputs = moved(case.make(), device)
    result = call(*inputs)
    return outcome_of(case, result, inputs)


def outcome_of(case: Case, result: object, inputs: Sequence[object]) -> tuple[Tensor, ...]:
    """The tensors of a result and the changed ones of the arguments, as `Case.outcome` orders them."""
    results: tuple[object, ...] = result if isinstance(result, tuple) else (result,)
    changed = [inputs[at] for at in case.changed]
    return tuple(each for each in (*results, *changed) if isinstance(each, Tensor))


def random_step_cases(count: int) -> list[Case]:
    """Steps of random kinds for `fill_step`."""
    chance = random.Random(5)
    return [
        Case(name, partial(make_step, name, random_sizes(chance)), 0.0, STEP_CHANGED)
        for name in (f"step {at}" for at in range(count))
    ]


filled_steps = [*fill_step_cases, *random_step_cases(RANDOM_STEPS)]
"""Cases of `fill_step`, and random steps."""

walked_steps = [
    Case(f"step {at}", partial(WalkStep.make, step), 0.0, WALK_CHANGED)
    for at, step in enumerate(random_steps(WALKED_STEPS))
]
"""Cases of `fill_walk_plan`: its special steps, and random ones."""
