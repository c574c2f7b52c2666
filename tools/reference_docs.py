"""Write docs/reference/ from the code, or with --check compare it: options, errors, metrics, endpoints, ops.

What these pages say lives once, in the code: help texts of option fields, docstrings of error classes and ops, rows of
the metrics table, routes of the app.
"""

from __future__ import annotations

import inspect
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from tokamak.config.option_values import option_values
from tokamak.config.options import (
    CACHE_VARIABLE,
    CONFIG_VARIABLE,
    ENV_PREFIX,
    EngineOptions,
    ServeOptions,
    option_group,
    option_names,
)
from tokamak.config.settle import REFUSED, settle_server
from tokamak.config.settle_graphs import REFUSED_GRAPHS
from tokamak.engine.client import EngineClient
from tokamak.errors import OverloadedError, TokamakError
from tokamak.ops.load import load_backends
from tokamak.ops.registry import OPS, REFERENCE
from tokamak.server import errors as server_errors
from tokamak.server.app import create_app
from tokamak.telemetry import metrics

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"

GENERATED = "<!-- made by tools/reference_docs.py from the code; `make docs` writes it anew -->\n"


def main(arguments: list[str]) -> int:
    """Write every page, or compare them all when asked to check."""
    check = arguments == ["--check"]
    stale: list[str] = []
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        path = FOLDER / f"{name}.md"
        text = GENERATED + "\n" + page()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.name)
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and stale:
        print(
            f"docs/reference: {', '.join(stale)} differ from the code; run `make docs`",
            file=sys.stderr,
        )
        return 1
    print(
        "docs/reference agrees with the code" if check else f"wrote {', '.join(stale) or 'nothing'}"
    )
    return 0


def options_page() -> str:
    """Every option with values, default and help, and the refused combinations."""
    engine = set(option_names(EngineOptions))
    lines = [
        "# Options",
        "",
        "One name everywhere: `LLM(model, max_model_len=4096)` in Python, `--max-model-len 4096` as a flag,",
        f"`{ENV_PREFIX}MAX_MODEL_LEN=4096` in the environment, `max_model_len = 4096` in the TOML file that `--config` or",
        f"`{CONFIG_VARIABLE}` names. A flag or argument wins over a variable, a variable over the file, the file over the",
        "default. Lists are written with commas, or as lists in TOML. An unknown name is an error in all four places.",
        "",
        f"`{CACHE_VARIABLE}` is no option: it names the folder where fetched models and compiled kernels are kept.",
    ]
    fields = ServeOptions.model_fields
    for group, names in itertools.groupby(fields, key=lambda name: option_group(fields[name])):
        only = "" if group != "server" else " (`tokamak serve` alone)"
        lines += [
            "",
            f"## {group}{only}",
            "",
            "| option | values | default | meaning |",
            "|---|---|---|---|",
        ]
        for name in names:
            field = fields[name]
            assert (name in engine) == (group != "server"), name
            values = option_values(field).replace("|", " \\| ")
            default = "-" if field.default in (None, ()) else f"`{field.default}`"
            lines.append(f"| `{name}` | {values} | {default} | {field.description} |")
    lines += [
        "",
        "## Refused together",
        "",
        "`tokamak doctor` shows what every `auto` became, and why. These combinations are refused at start, with a value",
        "that works:",
        "",
        *dict.fromkeys(
            f"- `{'` and `'.join(refusal.options)}`" for refusal in (*REFUSED, *REFUSED_GRAPHS)
        ),
        "- `num_blocks_override` and `kv_cache_memory_bytes`",
        "- `memory_fraction` below what the weights and one request need",
        "- `max_model_len` above what the cache holds",
        "- `uds` and `host` or `port`",
    ]
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Every error class with its meaning, parent and HTTP status."""
    tree = inspect.getdoc(sys.modules["tokamak.errors"]) or ""
    lines = [
        "# Errors",
        "",
        "Every message names the thing, its value and what was expected; after `hint:` it says what to do. On the command",
        "line an error is one line and exit status 2 for options, 1 for the rest.",
        "",
        "```",
        *(line[4:] for line in tree.splitlines() if line.startswith("    ")),
        "```",
    ]
    for kind in _error_classes(TokamakError)[1:]:
        status = server_errors.failure_of(_example(kind)).status
        parent = kind.__base__
        assert parent is not None
        lines += [
            "",
            f"## {kind.__name__}",
            "",
            f"{_first_sentence(kind.__doc__)} A kind of `{parent.__name__}`; HTTP {status}.",
        ]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every metric with its kind and meaning."""
    lines = [
        "# Metrics",
        "",
        "`/metrics` publishes these in Prometheus' text format. Counters only grow; names end in their unit.",
        "",
        "| metric | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    engine = [*metrics.ENGINE_METRICS, metrics.CACHE_USAGE]
    lines += [f"| `{row.name}` | {row.kind} | - | {row.help} |" for row in engine]
    for row in metrics.STEP_METRICS:
        labels = f"`{row.label}`" if row.label else "-"
        lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.help} |")
    for row, label in ((metrics.STEP_SPANS, "span"), (metrics.REQUEST_PHASES, "phase")):
        lines.append(f"| `{row.name}` | {row.kind} | `{label}` | {row.help} |")
    for row in vars(metrics).values():
        if isinstance(row, metrics.HttpMetric):
            kind = "histogram" if row.buckets else "counter"
            labels = ", ".join(f"`{label}`" for label in row.labels) or "-"
            lines.append(f"| `{row.name}` | {kind} | {labels} | {row.help} |")
    return "\n".join(lines) + "\n"


def endpoints_page() -> str:
    """Every route with its meaning and the fields of its body."""
    schema = create_app(_no_engine, settle_server(ServeOptions())).openapi()
    bodies = cast("dict[str, Any]", schema["components"]["schemas"])
    lines = [
        "# Endpoints",
        "",
        "`/openapi.json` on a running server is the machine's copy of this page.",
    ]
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            about = route.get("description") or route.get("summary", "")
            lines += ["", f"## {method.upper()} {path}", "", " ".join(str(about).split())]
            content = route.get("requestBody", {}).get("content", {}).get("application/json")
            if content is not None:
                body = bodies[content["schema"]["$ref"].rsplit("/", 1)[1]]
                lines += ["", "| field | values | |", "|---|---|---|"]
                required = set(body.get("required", []))
                for name, field in body["properties"].items():
                    lines.append(
                        f"| `{name}` | {_schema_values(field)} | {_need(name, field, required)} |"
                    )
    return "\n".join(lines) + "\n"


def ops_page() -> str:
    """Every op with its meaning and its backends."""
    load_backends()
    lines = [
        "# Ops",
        "",
        "An op's reference is its definition and runs anywhere; a backend is chosen once, when a model is built, and shown by",
        "`tokamak doctor`. `--kernels op=backend` asks for one by name.",
    ]
    for name in sorted(OPS):
        op = OPS[name]
        backends = [*(backend.name for backend in op.backends), REFERENCE]
        signature = inspect.signature(op.reference)
        lines += [
            "",
            f"## {name}",
            "",
            f"`{name}({', '.join(signature.parameters)})`, backends: {', '.join(backends)}.",
            "",
            inspect.cleandoc(op.reference.__doc__ or ""),
        ]
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "options": options_page,
    "errors": errors_page,
    "metrics": metrics_page,
    "endpoints": endpoints_page,
    "ops": ops_page,
}


def _error_classes(kind: type[TokamakError]) -> list[type[TokamakError]]:
    """A class and those below it, of our own modules, in order of definition."""
    found = [kind]
    for below in kind.__subclasses__():
        if below.__module__.startswith("tokamak."):
            found += _error_classes(below)
    return found


def _example(kind: type[TokamakError]) -> TokamakError:
    if issubclass(kind, OverloadedError):
        return kind("an example", retry_after_s=1.0)
    return kind("an example")


def _first_sentence(doc: str | None) -> str:
    return " ".join((doc or "").split("\n\n")[0].split())


def _schema_values(field: dict[str, Any]) -> str:
    """What a body's field takes, in a few words."""
    kinds = field.get("anyOf", [field])
    words: list[str] = []
    for kind in kinds:
        if "$ref" in kind:
            words.append(kind["$ref"].rsplit("/", 1)[1])
        elif "enum" in kind or "const" in kind:
            words += [json.dumps(value) for value in kind.get("enum", [kind.get("const")])]
        elif kind.get("type") == "array":
            words.append(f"list of {_schema_values(kind.get('items', {}))}")
        elif kind.get("type") != "null":
            words.append(str(kind.get("type", "any")))
    return " \\| ".join(dict.fromkeys(words))


def _need(name: str, field: dict[str, Any], required: set[str]) -> str:
    """Whether a field must be there, or its default where it has one of its own."""
    if name in required:
        return "required"
    default = field.get("default")
    return "" if default is None else f"default `{json.dumps(default)}`"


async def _no_engine() -> EngineClient:
    raise AssertionError("the app is only described, never started")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
