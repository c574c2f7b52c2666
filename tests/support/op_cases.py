"""Every op that has cases, found where they are kept, and how far two outcomes are apart."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from tokamak.ops.case import Case, difference
from tokamak.ops.load import OP_PACKAGES
from tokamak.ops.registry import OPS, Op


def ops_with_cases() -> list[tuple[Op[..., object], Sequence[Case]]]:
    """Ops and the cases of `ops/<package>/cases.py` named after them."""
    found: list[tuple[Op[..., object], Sequence[Case]]] = []
    for package in OP_PACKAGES:
        name = f"{package.__name__}.cases"
        if importlib.util.find_spec(name) is None:
            continue
        cases = importlib.import_module(name)
        found += [
            (OPS[place.removesuffix("_cases")], value)
            for place, value in vars(cases).items()
            if place.removesuffix("_cases") in OPS and place.endswith("_cases")
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
