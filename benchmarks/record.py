"""Where and of what was a figure measured? A record: device, versions, command and commit beside the figures."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tokamak.device.facts import DeviceFacts, cpu_facts

RECORDS = Path(__file__).parent / "records"
LIBRARIES = (
    "torch",
    "triton",
    "numpy",
    "tokenizers",
    "llvmlite",
    "llguidance",
    "fastapi",
    "llama-cpp-python",
)


def write_record(
    name: str, figures: Mapping[str, object], facts: DeviceFacts | None = None
) -> Path:
    """Write `records/<name>.json` with the figures and what they were measured on: the CPU unless given."""
    facts = facts or cpu_facts()
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *(_without_folder(word) for word in sys.orig_argv[1:])]),
        "commit": _commit(),
        "device": {
            "name": facts.name,
            "arch": facts.arch,
            "cores": facts.cores,
            "memory_gib": round(facts.memory_bytes / 1024**3, 1),
            "features": sorted(facts.features),
        },
        "python": platform.python_version(),
        "versions": {library: _version(library) for library in LIBRARIES if _version(library)},
        **figures,
    }
    path = RECORDS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def _without_folder(word: str) -> str:
    """An argument with absolute paths cut to their last part: a record names no machine's folders."""
    return re.sub(r"/(?:[^/=\s]+/)*(?=[^/=\s]+$)", "", word) if re.search(r"(^|=)/", word) else word


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=RECORDS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"
