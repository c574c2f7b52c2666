"""Can the text be held to this JSON schema, regex, grammar or choice?

`check_structured` refuses a bad constraint in the front end, before anything reaches the engine;
`compiled` makes the engine's matcher, which `grammar_state.py` follows token by token. Torch-free.

Both JSON kinds are written on one line, `, ` between items and `: ` after keys, as `json.dumps` does:
it is what models have read most of, and no whitespace is left to choose, so none can be repeated.
The matching is llguidance's.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tokamak.core.request import StructuredOutput
from tokamak.errors import GrammarError

T = TypeVar("T")

MAX_BYTES: Final = {
    "json_schema": 128 * 1024,
    "choice": 128 * 1024,
    "regex": 32 * 1024,
    "grammar": 32 * 1024,
}
"""The longest constraint of each kind: what compiles well inside a second."""

MAX_GRAMMAR_LINES: Final = 2000
"""Lines of a Lark grammar, and so its rules: compiling recurses along rules that name each other."""

COMPILE_STACK_BYTES: Final = 64 * 1024 * 1024
"""Stack of the threads that compile. The native compiler recurses 4 to 8 kB for each link in a chain of
rules or references, and overrunning a stack would end the process."""

MAX_SCHEMA_DEPTH: Final = 100
"""Brackets open at once in a schema's text; the native parser stops near 120."""

MAX_SCHEMA_PROPERTIES: Final = 2000
"""Named properties in a schema; compiling takes time quadratic in them."""

MAX_MESSAGE_CHARACTERS: Final = 500

MAX_LEXER_STATES: Final = 50_000
"""Bounds the memory of one matcher: a state takes 1 to 2 kB."""

_LIMITS: Final = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
JSON_STYLE: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""How JSON is written; the value of `x-guidance` in a schema inside a grammar."""

_STRINGS_AND_BRACKETS: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_NAMES: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA: Final = frozenset({"enum", "const", "default", "examples"})
_BOUNDS: Final = (
    ("minimum", "maximum", False),
    ("minimum", "exclusiveMaximum", True),
    ("exclusiveMinimum", "maximum", True),
    ("exclusiveMinimum", "exclusiveMaximum", True),
    ("minLength", "maxLength", False),
    ("minItems", "maxItems", False),
    ("minProperties", "maxProperties", False),
)


class _RefusedError(ValueError):
    """A constraint we refuse before the native compiler sees it, or that broke it."""


def check_structured(structured: StructuredOutput, *, field: str = "response_format") -> None:
    """Raise GrammarError, naming `field`, unless the constraint can be compiled."""
    try:
        text = _grammar_text(structured)
        failed, messages = _on_a_deep_stack(
            lambda: LLMatcher.validate_grammar_with_warnings(text, limits=_LIMITS)
        )
    except ValueError as error:
        raise GrammarError(_refusal(structured, str(error)), field=field) from None
    if failed:
        raise GrammarError(_refusal(structured, " ".join(messages)), field=field)


def compiled(structured: StructuredOutput, tokenizer: LLTokenizer) -> LLMatcher:
    """The constraint as a matcher at its start, or GrammarError. Takes milliseconds; use copies of it."""
    try:
        text = _grammar_text(structured)
        matcher = _on_a_deep_stack(lambda: LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS))
    except ValueError as error:
        raise GrammarError(_refusal(structured, str(error))) from None
    if matcher.is_error():
        raise GrammarError(_refusal(structured, matcher.get_error()))
    return matcher


def schema_text(schema: object, *, field: str = "response_format") -> str:
    """A client's schema object as the text of a `json_schema` constraint, or GrammarError."""
    if not isinstance(schema, dict):
        raise GrammarError(
            f"the JSON schema is a {type(schema).__name__}; it must be an object",
            field=field,
            hint="send the schema itself, not a string that holds it"
            if isinstance(schema, str)
            else None,
        )
    try:
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        message = f"the JSON schema is nested more than {MAX_SCHEMA_DEPTH} deep"
        raise GrammarError(message, field=field) from None


def _grammar_text(structured: StructuredOutput) -> str:
    """The constraint as llguidance reads it; ValueError says what is wrong with it."""
    value = structured.value
    if structured.kind == "json_object":
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_STYLE)
    size, limit = len(value.encode()), MAX_BYTES[structured.kind]
    if size > limit:
        raise _RefusedError(f"it is {size} bytes long; at most {limit} are compiled")
    match structured.kind:
        case "json_schema":
            check_schema(value)
            return LLMatcher.grammar_from_json_schema(value, overrides=JSON_STYLE)
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "grammar":
            if value.count("\n") >= MAX_GRAMMAR_LINES:
                raise _RefusedError(f"it has more than {MAX_GRAMMAR_LINES} lines")
            return LLMatcher.grammar_from_lark(value)
        case "choice":
            return LLMatcher.grammar_from_lark(_choice_grammar(value))


def _choice_grammar(value: str) -> str:
    choices: object = json.loads(value) if _depth(value) <= 1 else None
    if not isinstance(choices, list) or not choices:
        raise _RefusedError("it must be a JSON list of strings, with at least one")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise _RefusedError(f"{choice!r} is not a string with a character")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def check_schema(text: str) -> None:
    """Raise ValueError for what the native compiler lets through, or takes too long over."""
    if _depth(text) > MAX_SCHEMA_DEPTH:
        raise _RefusedError(f"it is nested more than {MAX_SCHEMA_DEPTH} deep")
    schema: object = json.loads(text)
    if not isinstance(schema, dict):
        raise _RefusedError(f"it must be an object, not {text[:40]}")
    if "x-guidance" in schema:
        raise _RefusedError("the keyword x-guidance is not supported")
    properties = 0
    pending: list[tuple[str, object, bool]] = [("#", schema, False)]
    while pending:
        path, node, is_names = pending.pop()
        if isinstance(node, list):
            pending += [(f"{path}/{at}", child, False) for at, child in enumerate(node)]
        if not isinstance(node, dict):
            continue
        if is_names:
            properties += len(node)
        else:
            _check_bounds(path, node)
        for key, child in node.items():
            if is_names or key not in _DATA:
                pending.append((f"{path}/{key}", child, not is_names and key in _NAMES))
    if properties > MAX_SCHEMA_PROPERTIES:
        raise _RefusedError(f"it names {properties} properties; at most {MAX_SCHEMA_PROPERTIES}")


def _check_bounds(path: str, node: dict[str, Any]) -> None:
    """Refuse bounds nothing lies between, also where the value could be left out."""
    for low_name, high_name, is_open in _BOUNDS:
        low, high = node.get(low_name), node.get(high_name)
        if not isinstance(low, int | float) or not isinstance(high, int | float):
            continue
        if low > high or (is_open and low == high):
            raise _RefusedError(f"{path} is unsatisfiable: {low_name} {low}, {high_name} {high}")


def _depth(text: str) -> int:
    """Most brackets open at once outside strings."""
    deepest = depth = 0
    for found in _STRINGS_AND_BRACKETS.finditer(text):
        if found[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in "]}":
            depth -= 1
    return deepest


_stack_size_lock: Final = threading.Lock()


def _on_a_deep_stack(call: Callable[[], T]) -> T:
    """Run a call on a thread with COMPILE_STACK_BYTES of stack, and wait for it.

    A panic of the native code is not an Exception, and would end more than this request: it becomes a
    ValueError.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=run, name="compile-grammar", daemon=True)
    with _stack_size_lock:
        usual = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        if isinstance(errors[0], Exception):
            raise errors[0]
        raise _RefusedError(f"the grammar compiler failed: {errors[0]}") from errors[0]
    return results[0]


def _refusal(structured: StructuredOutput, reason: str) -> str:
    return f"the {structured.kind} cannot be used: {shortened(reason)}"


def shortened(message: str) -> str:
    """A message of the native code, cut to what fits an error."""
    message = message.strip()
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    return message[:MAX_MESSAGE_CHARACTERS] + " …"
