"""What is this machine, and what would be decided on it? `tokamak doctor` prints facts, config and choices.

With a model (the default one if none is named) the engine is really built, so the backends, the forms of the weights
and the figures of their measurements are those that would serve. `--verify-graphs` records every size as a start does
and compares each with the eager forward. `--no-model` tells what can be told without one.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console

import tokamak
from tokamak.cli.flags import Parser, add_options, asked_options, read_options
from tokamak.cli.tables import show_rows, show_values
from tokamak.config.options import EngineOptions
from tokamak.config.reasons import AUTO, size
from tokamak.config.settle_device import settle_device
from tokamak.config.settle_graphs import sizes_text
from tokamak.device.facts import DeviceFacts, cpu_facts, probe_nvidia
from tokamak.engine.configure import configure
from tokamak.engine.core_face import CoreFace
from tokamak.engine.messages import EngineReport
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
    device = settle_device(options.device, cpu_facts(), probe_nvidia())
    report = machine_report(device.facts, device.why)
    report |= backend_report(options) if parsed.no_model else model_report(options)
    if parsed.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 0


def machine_report(facts: DeviceFacts, why: str) -> dict[str, Any]:
    """The device a model would run on, why there, and the versions, without torch."""
    return {
        "device": {
            "vendor": facts.vendor,
            "why": why,
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
    """The settled config with reasons, what a built engine chose, and what its graphs are.

    Raises:
        GraphMismatch: with `verify_graphs`, a recorded size gives other numbers than the eager forward.
    """
    if options.verify_graphs and options.graphs == AUTO:
        # On demand nothing is recorded before serving, and there would be nothing to verify.
        options = EngineOptions(
            model=options.model, **{**asked_options(options), "graphs": "startup"}
        )
    config = configure(options, progress=sys.stderr.isatty())
    core: CoreFace = importlib.import_module("tokamak.engine.core").EngineCore(config)
    try:
        while core.work_ahead():
            continue
        ready, report = core.ready(), core.report()
    finally:
        core.close()
    settled = dataclasses.asdict(config)
    facts = settled["model"].pop("facts")
    reasons = settled.pop("reasons")
    return {
        "model": facts,
        "config": settled,
        "reasons": list(reasons),
        "choices": [{"op": op, "backend": name, "why": why} for op, name, why in ready.choices],
        "cache": {
            "blocks": ready.total_blocks,
            "block_tokens": ready.block_tokens,
            "tokens": ready.total_blocks * ready.block_tokens,
        },
        "graphs": graph_report(report),
        "load_s": dict(ready.load_s),
    }


def graph_report(report: EngineReport) -> dict[str, Any]:
    """When, why and by what steps are recorded, every graph, and the verdicts of verification."""
    return {
        "when": report.graphs_when,
        "why": report.graphs_why,
        "backend": report.graph_backend,
        "reserve_bytes": report.graph_reserve_bytes,
        "cost": report.graph_cost,
        "graphs": msgspec.to_builtins(report.graphs),
        "verified": msgspec.to_builtins(report.verdicts),
    }


def verified_text(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """What verification found, in a line."""
    if not verdicts:
        return "not asked for; --verify-graphs compares every size with the eager forward"
    bad = [verdict for verdict in verdicts if not verdict["ok"]]
    buckets = len({(verdict["graph"], verdict["bucket"]) for verdict in verdicts})
    found = f"{len(bad)} differ" if bad else "all agree with the eager forward"
    return f"{len(verdicts)} sizes of {buckets} buckets, {found}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    device = dict(report["device"])
    device["memory_bytes"] = size(device["memory_bytes"])
    show_values(console, "device", device)
    show_values(
        console, "versions", {k: v or "not installed" for k, v in report["versions"].items()}
    )
    if "model" in report:
        show_values(console, "model", report["model"])
        show_rows(console, "config", report["reasons"], ("field", "value", "why"))
        show_values(console, "cache", report["cache"])
        _show_graphs(console, report["graphs"])
        show_values(console, "start", {name: f"{s:.2f} s" for name, s in report["load_s"].items()})
    show_rows(console, "ops", report["choices"], ("op", "backend", "why"))
    if "backends" in report:
        show_values(console, "backends", report["backends"])


def _show_graphs(console: Console, graphs: dict[str, Any]) -> None:
    show_values(
        console,
        "graphs",
        {
            "when": f"{graphs['when']}: {graphs['why']}",
            "backend": graphs["backend"],
            "reserve": f"{size(graphs['reserve_bytes'])} ({graphs['cost']})",
            "verified": verified_text(graphs["verified"]),
        },
    )
    rows = [
        {
            **graph,
            "sizes": sizes_text(graph["ladder"]),
            "recorded": sizes_text(graph["recorded"]),
            "pool": size(graph["pool_bytes"]),
        }
        for graph in graphs["graphs"]
    ]
    columns = ("name", "kind", "sizes", "recorded", "segments", "pool", "state")
    show_rows(console, "recordings", rows, columns)
    if graphs["verified"]:
        columns = ("graph", "bucket", "size", "ok", "worst")
        show_rows(console, "verified", graphs["verified"], columns)
