"""How does a model get onto this machine? `tokamak model fetch NAME` fetches it and prints where it lies."""

from __future__ import annotations

from tokamak.checkpoint.fetch import resolve_model
from tokamak.cli.flags import Parser
from tokamak.config.options import DEFAULT_MODEL


def run(arguments: list[str]) -> int:
    """Fetch a model that is not here yet; see `run --help`."""
    parser = Parser(prog="tokamak model", description="Fetch a model.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    fetch = commands.add_parser("fetch", help="fetch a model unless it is here; print its path")
    fetch.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"a hub id, a path, or {DEFAULT_MODEL} (default: {DEFAULT_MODEL})",
    )
    parsed = parser.parse(arguments)
    print(resolve_model(parsed.model, progress=True))
    return 0
