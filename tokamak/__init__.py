"""Tokamak: an LLM inference engine you can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokamak.core.request import SamplingParams, StructuredOutput
from tokamak.device.openmp import let_threads_sleep
from tokamak.errors import TokamakError

if TYPE_CHECKING:
    from tokamak.config.options import EngineOptions
    from tokamak.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "EngineOptions",
    "SamplingParams",
    "StructuredOutput",
    "TokamakError",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Load the torch half on first use: the front end and the CLI never need it."""
    if name == "LLM":
        let_threads_sleep()
        from tokamak.llm import LLM  # noqa: PLC0415

        return LLM
    if name == "EngineOptions":
        from tokamak.config.options import EngineOptions  # noqa: PLC0415

        return EngineOptions
    raise AttributeError(f"module 'tokamak' has no attribute {name!r}")
