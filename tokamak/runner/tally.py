"""Where did the steps go? Counts by mode and reason, padding (SH-13), and the time of exchanges."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokamak.core.plan import Mode, StepShape

EXCHANGE_BOUNDS_S = (50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 10e-3, 100e-3, 1.0)
"""Upper ends of the histogram's bins; a last bin holds what is slower."""


@dataclass(slots=True)
class ModeTally:
    """Sums over the steps of one mode."""

    steps: int = 0
    scheduled_tokens: int = 0
    running_tokens: int = 0

    def add(self, scheduled_tokens: int, running_tokens: int) -> None:
        """Add a step."""
        self.steps += 1
        self.scheduled_tokens += scheduled_tokens
        self.running_tokens += running_tokens

    @property
    def waste(self) -> float:
        """Running tokens per scheduled one, 1.0 without padding; infinite when no step had work of its own."""
        if not self.running_tokens:
            return 1.0
        if not self.scheduled_tokens:
            return float("inf")
        return self.running_tokens / self.scheduled_tokens


@dataclass(slots=True)
class ExchangeTally:
    """How long exchanges took."""

    bins: list[int] = field(default_factory=lambda: [0] * (len(EXCHANGE_BOUNDS_S) + 1))
    """Exchanges by `EXCHANGE_BOUNDS_S`, each in one bin."""
    exchanges: int = 0
    total_s: float = 0.0


@dataclass(slots=True)
class StepTally:
    """Sums over all steps of a rank; numbers only, so it can be copied and published."""

    modes: dict[Mode, ModeTally] = field(
        default_factory=lambda: {mode: ModeTally() for mode in Mode}
    )
    late: ModeTally = field(default_factory=ModeTally)
    """Token rows of late layers in the steps where they run on their own, whatever the mode."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Steps by `StepShape.why`."""
    exchange: ExchangeTally = field(default_factory=ExchangeTally)

    def count(self, shape: StepShape, exchange_s: float | None) -> None:
        """Add a step; `exchange_s` is how long its exchange took, None where none was made."""
        self.modes[shape.mode].add(shape.scheduled_tokens, shape.running_tokens)
        if shape.late is not None:
            self.late.add(shape.late.scheduled_tokens, shape.late.running_tokens)
        self.reasons[shape.why] = self.reasons.get(shape.why, 0) + 1
        if exchange_s is not None:
            self.exchange.bins[sum(exchange_s > bound for bound in EXCHANGE_BOUNDS_S)] += 1
            self.exchange.exchanges += 1
            self.exchange.total_s += exchange_s

    def share(self, why: str) -> float:
        """The share of steps with this reason; 0.0 before the first step."""
        steps = sum(self.reasons.values())
        return self.reasons.get(why, 0) / steps if steps else 0.0
