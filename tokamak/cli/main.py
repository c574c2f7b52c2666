"""Which command is meant? `tokamak COMMAND …` finds the command's module, runs it and turns errors into a line.

A command's module is imported when it is chosen, so `--version` and `--help` answer at once, without torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from tokamak import __version__
from tokamak.errors import OptionError, TokamakError

COMMANDS = {
    "chat": "talk to a model in the terminal",
    "serve": "serve a model over the OpenAI API",
    "bench": "measure an engine or a running server",
    "doctor": "show what this machine is and what would be chosen on it",
    "plan": "show what serving a model would take, without its weights",
    "model": "fetch a model",
}

USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


class Command(Protocol):
    """What a command's module offers."""

    def run(self, arguments: list[str]) -> int:
        """Run with the arguments after the command's name; returns the exit status."""
        ...


def main() -> None:
    """The `tokamak` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status; errors become one line on stderr."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _parser().print_help()
        return 0 if arguments else USAGE_ERROR
    if arguments[0] in ("-V", "--version"):
        print(f"tokamak {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        print(f"tokamak: error: there is no command {name!r}; {_commands_hint()}", file=sys.stderr)
        return USAGE_ERROR
    command = cast("Command", importlib.import_module(f"tokamak.cli.{name}"))
    try:
        return command.run(list(arguments[1:]))
    except TokamakError as error:
        print(f"tokamak: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, OptionError) else FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`tokamak doctor | head`): nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokamak",
        description="An LLM inference engine you can read.",
        epilog="`tokamak COMMAND --help` shows a command's options.",
    )
    parser.add_argument("-V", "--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _commands_hint() -> str:
    return f"the commands are {', '.join(COMMANDS)}"
