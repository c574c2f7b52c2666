"""What is this machine, and what would be decided on it? `tokamak doctor` prints facts, config and choices.

With a model (the default one if none is named) the engine is really built, so the backends, the forms of the weights
and the figures of their measurements are those that would serve. `--no-model` tells what can be told without one.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import platform
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

import tokamak
from tokamak.cli.flags import Parser, add_options, asked_options, read_options
from tokamak.config.options import EngineOptions
from tokamak.config.reasons import size
from tokamak.device.facts import DeviceFacts, cpu_facts
from tokamak.engine.configure import configure
from tokamak.telemetry.log import set_up_logging

LIBRARIES = (
    "torch",
    "numpy",
    "llvmlite",
    "triton",
    "safetensors",
    "tokenizers",
    "gguf",
    "llguidance",
    "huggingface-hub",
    "transformers",
    "fastapi",
    "uvicorn",
    "pydantic",
    "pyzmq",
    "msgspec",
)


def run(arguments: list[str]) -> int:
    """Print what is known; see `run --help`."""
    parser = Parser(
        prog="tokamak doctor",
        usage="tokamak doctor [MODEL] [--no-model] [--json] [options]",
        description="Show what this machine is and what would be chosen on it.",
    )
    parser.add_argument("--no-model", action="store_true", help="do not look at any model")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    add_options(parser, EngineOptions)
    parsed = parser.parse(arguments)
    options = read_options(parsed, EngineOptions)
    set_up_logging("warning")
    report = machine_report(cpu_facts())
    report |= backend_report(options) if parsed.no_model else model_report(options)
    if parsed.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 0


def machine_report(facts: DeviceFacts) -> dict[str, Any]:
    """The device and the versions, without torch."""
    return {
        "device": {
            "vendor": facts.vendor,
            "arch": facts.arch,
            "name": facts.name,
            "cores": facts.cores,
            "memory_bytes": facts.memory_bytes,
            "features": sorted(facts.features),
            "optional_libraries": sorted(facts.libraries),
        },
        "versions": {
            "tokamak": tokamak.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            **{name: _version(name) for name in LIBRARIES},
        },
    }


def backend_report(options: EngineOptions) -> dict[str, Any]:
    """What each op would be bound to, and what else it has."""
    backends = importlib.import_module("tokamak.cli.backends")
    available: dict[str, tuple[str, ...]] = backends.op_backends()
    return {
        "choices": [dataclasses.asdict(choice) for choice in backends.op_choices(options)],
        "backends": {name: list(names) for name, names in available.items()},
    }


def model_report(options: EngineOptions) -> dict[str, Any]:
    """The settled config with reasons, and what a built engine chose."""
    settled = dataclasses.asdict(configure(options, progress=sys.stderr.isatty()))
    with tokamak.LLM(options.model, **asked_options(options)) as llm:
        info = llm.info
    facts = settled["model"].pop("facts")
    reasons = settled.pop("reasons")
    return {
        "model": facts,
        "config": settled,
        "reasons": list(reasons),
        "choices": [{"op": op, "backend": name, "why": why} for op, name, why in info.choices],
        "cache": {
            "blocks": info.total_blocks,
            "block_tokens": info.block_tokens,
            "tokens": info.total_blocks * info.block_tokens,
        },
        "load_s": dict(info.load_s),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    device = dict(report["device"])
    device["memory_bytes"] = size(device["memory_bytes"])
    _table(console, "device", device)
    _table(console, "versions", {k: v or "not installed" for k, v in report["versions"].items()})
    if "model" in report:
        _table(console, "model", report["model"])
        _rows(console, "config", report["reasons"], ("field", "value", "why"))
        _table(console, "cache", report["cache"])
        _table(console, "start", {name: f"{s:.2f} s" for name, s in report["load_s"].items()})
    _rows(console, "ops", report["choices"], ("op", "backend", "why"))
    if "backends" in report:
        _table(console, "backends", report["backends"])


def _table(console: Console, title: str, values: dict[str, Any]) -> None:
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None
    )
    for name, value in values.items():
        text = ", ".join(str(part) for part in value) if isinstance(value, list) else str(value)
        table.add_row(name, text)
    console.print(table)
    console.print()


def _rows(
    console: Console, title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]
) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)
    console.print()
