"""How do a command's options become an engine's config? Find the model, read what it says, settle."""

from __future__ import annotations

import sys

from tokamak.checkpoint.fetch import resolve_model
from tokamak.checkpoint.source import open_checkpoint
from tokamak.config.engine import EngineConfig
from tokamak.config.options import EngineOptions
from tokamak.config.settle import settle_engine
from tokamak.device.facts import cpu_facts


def settled(options: EngineOptions) -> EngineConfig:
    """The config of the model on this machine; fetches the model if it is not here.

    Raises:
        ModelError: the model cannot be found or used.
        OptionError: an option cannot be met.
    """
    path = resolve_model(options.model, progress=sys.stderr.isatty())
    return settle_engine(options, cpu_facts(), open_checkpoint(path).facts(), path)
