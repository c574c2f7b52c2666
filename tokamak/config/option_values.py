"""What may the value of an option be? How values are spelled, what help says of them, and what an error asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, cast, get_args, get_origin

from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import NoDecode

_BYTE_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}

_DTYPE_SPELLINGS = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
}

_CACHE_DTYPE_SPELLINGS = {
    "bf16": "bfloat16",
    "fp8_e4m3": "fp8",
}


def as_bytes(value: object) -> object:
    """`2GiB`, `512 MB` or `1.5G` as a number of bytes; other values pass for pydantic to judge."""
    if not isinstance(value, str):
        return value
    if value == "auto":
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", value.lower())
    if match is None:
        raise ValueError("a number of bytes, such as 2GiB or 512MB")
    return int(float(match[1]) * _BYTE_UNITS[match[2] or ""])


def spelled_dtype(value: object) -> object:
    """A short name of an arithmetic as the long one; other values pass for pydantic to judge."""
    return _DTYPE_SPELLINGS.get(value, value) if isinstance(value, str) else value


def spelled_cache_dtype(value: object) -> object:
    """The same for formats of cached rows."""
    return _CACHE_DTYPE_SPELLINGS.get(value, value) if isinstance(value, str) else value


def _strings(value: object) -> object:
    """A comma-separated text, or a sequence of them, as one list of texts."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, Mapping):
        return [f"{key}={item}" for key, item in value.items()]  # pyright: ignore[reportUnknownVariableType]
    return value


def _sizes(value: object) -> object:
    """Comma-separated counts, one count, or a sequence of them, as one tuple; an empty text is the empty list."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, str) or value == "auto":
        return value
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not all(re.fullmatch(r"-?[0-9]+", part) for part in parts):
        raise ValueError("auto, or counts such as 1,2,4")
    return tuple(int(part) for part in parts)


Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
ByteCount = Annotated[int, Field(ge=1)]
Strings = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_strings)]
Sizes = Annotated[Auto | tuple[int, ...], NoDecode, BeforeValidator(_sizes)]
Assignments = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+=[A-Za-z0-9_]+$")], ...],
    NoDecode,
    BeforeValidator(_strings),
]


def option_values(field: FieldInfo) -> str:
    """What an option takes, for help and documentation: `N`, `auto|N`, `fcfs|priority`."""
    if field.annotation is bool:
        return "true|false"
    kinds = list(dict.fromkeys(_kinds(field.annotation)))
    kinds.sort(key=lambda kind: kind.isupper())
    return "|".join(kinds)


def _kinds(annotation: object) -> list[str]:
    origin = get_origin(annotation)
    if origin is Literal:
        return [str(value) for value in get_args(annotation)]
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin is tuple:
        return ["N,N" if get_args(annotation)[0] is int else "NAMES"]
    if origin is not None:
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return {int: ["N"], float: ["X"], str: ["TEXT"]}.get(cast("type", annotation), [])


def expected_of(problem: ErrorDetails) -> str:
    """What was wanted, so that it follows "it must be"."""
    limits = problem.get("ctx", {})
    match problem["type"]:
        case "int_parsing" | "int_type" | "int_from_float":
            return "an integer"
        case "float_parsing" | "float_type":
            return "a number"
        case "bool_parsing" | "bool_type":
            return "true or false"
        case "string_type":
            return "a text"
        case "tuple_type":
            return "a list"
        case "string_pattern_mismatch":
            return "pairs of op=backend"
        case "greater_than_equal":
            return f"at least {limits['ge']}"
        case "greater_than":
            return f"above {limits['gt']}"
        case "less_than_equal":
            return f"at most {limits['le']}"
        case "less_than":
            return f"below {limits['lt']}"
        case "literal_error":
            return str(limits["expected"])
        case "value_error":
            return str(limits["error"])
        case _:
            return problem["msg"].removeprefix("Input should be ")
