"""Which backends have the ops here, without a model? Imports torch, so `doctor` loads this module when it needs it."""

from __future__ import annotations

from tokamak.config.options import EngineOptions
from tokamak.config.reasons import AUTO
from tokamak.config.settle_device import settle_device
from tokamak.device.facts import cpu_facts, probe_nvidia
from tokamak.ops.load import load_backends
from tokamak.ops.registry import OPS, REFERENCE, Choice


def op_choices(options: EngineOptions) -> list[Choice]:
    """The backend each op would be bound to on this machine, in order of names.

    Raises:
        NoBackendError: a backend that was asked for does not exist or does not fit.
    """
    load_backends()
    prefer = dict(pair.split("=", 1) for pair in options.kernels)
    facts = settle_device(options.device, cpu_facts(), probe_nvidia()).facts
    asked = options.kv_cache_dtype
    other = None if asked in (AUTO, options.dtype) else asked
    return [OPS[name].bind(facts, prefer.get(name), cache_dtype=other)[1] for name in sorted(OPS)]


def op_backends() -> dict[str, tuple[str, ...]]:
    """Every op's backends in order of preference, the reference last."""
    load_backends()
    return {
        name: (*(backend.name for backend in OPS[name].backends), REFERENCE) for name in sorted(OPS)
    }
