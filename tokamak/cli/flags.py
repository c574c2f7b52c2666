"""How do options become flags? Every field of an options model is a flag of the same name.

Values stay text until the options model judges them, so that a flag, a variable and a file are read by the
same rules and a mistake reads the same.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn, TypeVar

from tokamak.config.option_values import option_values
from tokamak.config.options import ENV_PREFIX, EngineOptions, closest, option_group, option_names
from tokamak.errors import OptionError

OptionsT = TypeVar("OptionsT", bound=EngineOptions)

GROUP_TITLES = {
    "model": "model",
    "cache": "cache",
    "scheduler": "scheduler",
    "kernels": "kernels",
    "graphs": "graphs",
    "server": "server",
}


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are OptionErrors of one line, with the closest flag as a hint."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise OptionError(message, hint=f"see {self.prog} --help")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Parse all arguments; an unknown one is named with the closest flag.

        Raises:
            OptionError: an argument is unknown, or lacks its value.
        """
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            flag = unknown[0].partition("=")[0]
            known = [text for action in self._actions for text in action.option_strings]
            hint = closest(flag, known) if flag.startswith("-") else f"see {self.prog} --help"
            raise OptionError(f"{self.prog} takes no argument {unknown[0]!r}", hint=hint)
        return parsed


def add_options(parser: argparse.ArgumentParser, options: type[EngineOptions]) -> None:
    """Give a parser the model as a positional argument and a flag for every option."""
    parser.add_argument("model", nargs="?", default=None, metavar="MODEL", help=argparse.SUPPRESS)
    groups = {
        name: parser.add_argument_group(title)
        for name, title in GROUP_TITLES.items()
        if any(option_group(field) == name for field in options.model_fields.values())
    }
    for name in option_names(options):
        field = options.model_fields[name]
        default = "" if field.default in (None, ()) else f" (default: {field.default})"
        settings: dict[str, Any] = {
            "dest": f"option_{name}",
            "default": argparse.SUPPRESS,
            "help": f"{field.description}{default}".replace("%", "%%"),
        }
        if field.annotation is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["metavar"] = option_values(field)
            if option_values(field) == "NAMES":
                settings["action"] = "append"
        flag = f"--{name.replace('_', '-')}"
        groups[option_group(field)].add_argument(flag, **settings)
    parser.epilog = (
        f"Every option can also be set as {ENV_PREFIX}NAME or in a TOML file given by --config or "
        f"{ENV_PREFIX}CONFIG; a flag wins over a variable, a variable over the file."
    )


def read_options(arguments: argparse.Namespace, options: type[OptionsT]) -> OptionsT:
    """The options of parsed flags, the environment and the TOML file.

    Raises:
        OptionError: a value is not what its option takes, or two models are named.
    """
    given: dict[str, Any] = {}
    for name in option_names(options):
        if not hasattr(arguments, f"option_{name}"):
            continue
        value = getattr(arguments, f"option_{name}")
        given[name] = ",".join(value) if isinstance(value, list) else value
    if arguments.model is not None:
        if given.get("model", arguments.model) != arguments.model:
            raise OptionError(
                f"the model is given twice: {arguments.model!r} and --model {given['model']!r}",
                hint="leave one of them out",
            )
        given["model"] = arguments.model
    return options(_from="flags", **given)


def asked_options(options: EngineOptions) -> dict[str, Any]:
    """What was asked for anywhere (flags, environment, file), as arguments of `LLM` after the model.

    The file itself is left out: its values are among them.
    """
    engine = set(option_names(EngineOptions)) - {"model", "config"}
    return options.model_dump(include=engine & options.model_fields_set)
