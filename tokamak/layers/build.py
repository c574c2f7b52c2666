"""What every layer is built with: device, dtype, and ops bound to backends.

Binding happens once, here; the choices made are what `tokamak doctor` prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch

from tokamak.core.weight import Weight
from tokamak.device.facts import DeviceFacts
from tokamak.ops.linear import PackedLinear, pack_with_reason
from tokamak.ops.registry import REFERENCE, Choice, Op

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Build:
    """The facts layers are built from, and the record of what was chosen."""

    facts: DeviceFacts
    device: torch.device
    dtype: torch.dtype
    exact: bool
    """Whether only exact arithmetic is allowed (float32 on the CPU: the oracle of the tests)."""
    max_model_len: int
    cache_dtype: str = ""
    """The number format of keys and values, as sub-caches name it; that of `dtype` when left out."""
    bounded_replay: bool = False
    """Whether late layers of a model in stages run for a window of each prompt alone (`Stages.bounded`)."""
    host_tables: bool = False
    """Whether tables of n-grams stay in the host's memory."""
    prefer: Mapping[str, str] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    """Ops that are called in eager regions only."""
    layers: list[object] = field(default_factory=list)
    """Layers whose eager regions find them by number; see `enroll`."""
    forms: dict[str, Counter[str]] = field(default_factory=dict)
    """How many weights took each packed form, for `linear` and `head`."""

    def __post_init__(self) -> None:
        self.cache_dtype = self.cache_dtype or self._own_dtype

    @property
    def _own_dtype(self) -> str:
        """The name of `dtype`."""
        return str(self.dtype).removeprefix("torch.")

    def _choose(self, op: Op[P, R], prefer: str | None = None) -> tuple[Callable[P, R], Choice]:
        """The backend of an op for this machine and these caches."""
        other = None if self.cache_dtype == self._own_dtype else self.cache_dtype
        return op.bind(self.facts, prefer, cache_dtype=other)

    def bind(self, op: Op[P, R], *, live: bool = False) -> Callable[P, R]:
        """The backend of an op on this machine; a plain call afterwards.

        `live` says that it is called in eager regions only, so that a token graph never records it.
        """
        call, choice = self._choose(op, self.prefer.get(op.name))
        self.choices[op.name] = choice
        if live:
            self.live.add(op.name)
        return call

    def bind_joined(
        self, op: Op[P, R], parts: Collection[Op[..., Any]], *, live: bool = False
    ) -> Callable[P, R] | None:
        """The backend of an op that does at once what `parts` do; None where calling them is as good.

        That is where no kernel of it fits, or where a backend of one of them was asked for.
        """
        if op.name not in self.prefer:
            if any(part.name in self.prefer for part in parts):
                return None
            if self._choose(op)[1].backend == REFERENCE:
                return None
        return self.bind(op, live=live)

    def enroll(self, layer: object) -> int:
        """A number under which the body of an eager region finds a layer in the step's context."""
        self.layers.append(layer)
        return len(self.layers) - 1

    def widened(self) -> Build:
        """The same build for layers that multiply in float32 whatever the model's dtype; it shares all records."""
        return replace(self, dtype=torch.float32)

    def unrecordable(self, *, token_graph: bool) -> tuple[str, ...]:
        """Bound ops a recording cannot hold, as `op=backend`; a token graph runs the live ones eagerly."""
        return tuple(
            f"{choice.op}={choice.backend}"
            for choice in self.choices.values()
            if not choice.recordable and not (token_graph and choice.op in self.live)
        )

    def pack(self, weight: Weight, *, head: bool = False) -> PackedLinear:
        """A [out, in] weight in the form its products run fastest in; the vocabulary head is told apart.

        `prefer["linear"]` and `prefer["head"]` force a form by name.
        """
        name = "head" if head else "linear"
        packed, reason = pack_with_reason(
            weight,
            dtype=self.dtype,
            exact=self.exact,
            facts=self.facts,
            head=head,
            prefer=self.prefer.get(name),
            device=self.device,
        )
        forms = self.forms.setdefault(name, Counter())
        forms[packed.form] += 1
        counts = ", ".join(f"{count} as {form}" for form, count in forms.items())
        self.choices[name] = Choice(name, " + ".join(forms), f"packed {counts}; {reason}")
        return packed
