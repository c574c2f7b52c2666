"""How do options become everything an engine and its front end are made from?

The one way from what was asked to what is decided, for `LLM`, `serve` and `doctor`: find the model, read what it says
of itself, settle. No tensor is read and torch is not imported.
"""

from __future__ import annotations

import time
from pathlib import Path

from tokamak.checkpoint.fetch import resolve_model
from tokamak.checkpoint.source import open_checkpoint
from tokamak.checkpoint.tokenizer import load_chat_template, load_tokenizer
from tokamak.config.engine import EngineConfig, ModelConfig
from tokamak.config.options import EngineOptions
from tokamak.config.settle import settle_engine
from tokamak.config.settle_device import settle_device
from tokamak.core.generation import EngineInfo
from tokamak.device.facts import cpu_facts, probe_nvidia
from tokamak.engine.messages import Ready
from tokamak.text.chat_format import ChatFormat
from tokamak.text.tokenizer import Tokenizer


def configure(options: EngineOptions, *, progress: bool = False) -> EngineConfig:
    """Find the model, fetching it if need be, and settle the options.

    Args:
        options: what was asked.
        progress: show a progress bar while fetching.

    Raises:
        ModelError: there is no such model, or it is incomplete or of a kind we do not implement.
        OptionError: a setting cannot be met.
    """
    device = settle_device(options.device, cpu_facts(), probe_nvidia())
    path = resolve_model(options.model, progress=progress, revision=options.revision)
    return settle_engine(
        options, device.facts, open_checkpoint(path).facts(), path, device_why=device.why
    )


def load_text(config: ModelConfig) -> tuple[Tokenizer, ChatFormat | None]:
    """A model's tokenizer, and its chat template if it has one."""
    path = Path(config.path)
    tokenizer = load_tokenizer(path, load_format=config.load_format)
    return tokenizer, load_chat_template(path, config.chat_template)


def engine_info(config: EngineConfig, ready: Ready) -> EngineInfo:
    """What clients may know of an engine that is ready."""
    return EngineInfo(
        served_names=config.model.served_names,
        max_model_len=ready.max_model_len,
        vocab_tokens=ready.vocab_tokens,
        block_tokens=ready.block_tokens,
        total_blocks=ready.total_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        started_unix_s=time.time(),
        choices=tuple(ready.choices),
        load_s=ready.load_s,
    )
