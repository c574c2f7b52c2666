"""How does a request's body become one of our models, or an error that names the field?

In: bytes of at most `max_body_bytes`, counted while they arrive. Out: a pydantic model, or a RequestError whose
message has the field, its value, what was expected and, for an unknown name, the closest known one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokamak.errors import RequestError
from tokamak.server.errors import (
    BodyTooLargeError,
    ClientGoneError,
    JsonError,
    UnknownFieldError,
    failure_of,
)
from tokamak.server.protocol.common import Body

M = TypeVar("M", bound=Body)

Path = tuple[int | str, ...]
"""Keys and indices that lead to a place in a body."""

LONGEST_QUOTE = 80
"""Characters of a client's value that a message repeats."""

EXPECTED = {
    "prompt": "a text, a list of token ids, a list of texts or a list of lists of token ids",
    "stop": "a text or a list of texts",
    "content": 'a text or a list of parts such as {"type": "text", "text": "Hello"}',
    "schema": "a JSON schema as an object",
    "json": "a JSON schema as an object",
}
"""What fields of several types take; the others have one type, which pydantic names."""

OPEN_MAPS = {"logit_bias", "metadata"}
"""Fields whose keys are the client's data: an error names the field, not the key."""


async def read_body(request: Request, model: type[M]) -> M:
    """The body of a request as `model`.

    Raises:
        RequestError: it is not JSON, or not what the model wants.
        BodyTooLargeError: it has more bytes than the server takes.
        ClientGoneError: the client left while sending it.
    """
    try:
        raw = await request.body()
    except ClientDisconnect as error:
        raise ClientGoneError("the client left while sending its request") from error
    return parsed(raw, model)


def parsed(raw: bytes, model: type[M]) -> M:
    """The body in these bytes, or a RequestError."""
    try:
        data: object = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise JsonError(
            f"the body is not JSON: {error}", hint="send a JSON object in UTF-8"
        ) from error
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _request_error(error, data, model) from error


def _request_error(error: ValidationError, data: object, model: type[Body]) -> RequestError:
    places = [(_path(data, detail), detail) for detail in error.errors(include_url=False)]
    # A value that fits no member of a union has an error for each: the deepest says most.
    path, detail = max(places, key=lambda place: len(place[0]))
    same = [other for place, other in places if place == path]
    name = _written(_field(path))
    if detail["type"] == "unknown_name":
        return _unknown((*path, _context(detail, "name")), model)
    if detail["type"] == "missing":
        return RequestError(f"{name} is missing", field=name)
    if not path:
        return RequestError(
            f"the body is {_quoted(detail['input'])}; it must be a JSON object", field=None
        )
    if detail["type"] == "wrong_value":
        place = (*path, _context(detail, "name"))
        value = _quoted(detail.get("ctx", {}).get("value"))
        message = f"{_written(place)} is {value}; {detail['msg']}"
        return RequestError(message, field=_written(_field(place)))
    value = _quoted(detail["input"])
    return RequestError(f"{_written(path)} is {value}; {_wanted(path, same)}", field=name)


def _context(detail: ErrorDetails, name: str) -> str:
    """What a validator of ours said of an error."""
    return str(detail.get("ctx", {}).get(name))


def _field(path: Path) -> Path:
    """The place of the field that a place belongs to: keys that are the client's data are no fields."""
    for at, step in enumerate(path):
        if step in OPEN_MAPS:
            return path[: at + 1]
    return path


def _path(data: object, detail: ErrorDetails) -> Path:
    """A place in the client's data: pydantic's place without the names of union members."""
    path: list[int | str] = []
    loc = detail["loc"]
    absent = detail["type"] == "missing"
    for at, step in enumerate(loc):
        if isinstance(data, dict):
            fields = cast("dict[str, object]", data)
            if step in fields:
                path.append(step)
                data = fields[str(step)]
            elif absent and at == len(loc) - 1:
                path.append(step)
        elif isinstance(data, list):
            items = cast("list[object]", data)
            if isinstance(step, int) and step < len(items):
                path.append(step)
                data = items[step]
    return tuple(path)


def _written(path: Sequence[int | str]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text[: 4 * LONGEST_QUOTE]


def _wanted(path: Path, details: list[ErrorDetails]) -> str:
    names = [step for step in path if isinstance(step, str)]
    field = names[-1] if names else ""
    if field in EXPECTED and path[-1] == field:
        return f"it must be {EXPECTED[field]}"
    first = details[0]
    if first["type"] == "none_required":
        return "this server does not support it; leave it out or send null"
    if first["type"] == "literal_error":
        return f"this server takes only {first['ctx']['expected'] if 'ctx' in first else 'others'}"
    if first["type"] == "model_type":
        return "it must be a JSON object"
    if first["type"] == "too_many":
        return first["msg"]
    # pydantic says "Input should be …" or "String should have …".
    wanted = list(dict.fromkeys(other["msg"].partition(" should ")[2] for other in details))
    return f"it must {' or '.join(wanted)}"


def _unknown(path: Path, model: type[Body]) -> RequestError:
    name = _written(path)
    close = difflib.get_close_matches(str(path[-1])[:LONGEST_QUOTE], _all_names(model), n=1)
    return UnknownFieldError(
        f"{name} is no field of this server",
        field=name,
        hint=f"did you mean {close[0]}?" if close else None,
    )


@cache
def _all_names(model: type[Body]) -> tuple[str, ...]:
    """All names of a body and of the bodies in it."""
    schema: dict[str, Any] = model.model_json_schema()
    names = list(schema.get("properties", {}))
    for part in schema.get("$defs", {}).values():
        names.extend(part.get("properties", {}))
    return tuple(names)


def _quoted(value: object) -> str:
    """A client's value for a message: short ones as they came, the size of others."""
    if isinstance(value, dict) and value:
        return f"an object with {len(cast('dict[str, object]', value))} names"
    if isinstance(value, list) and value:
        return f"a list of {len(cast('list[object]', value))}"
    if isinstance(value, str):
        value = value if len(value) <= LONGEST_QUOTE else value[:LONGEST_QUOTE] + "…"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2 * LONGEST_QUOTE else text[:LONGEST_QUOTE] + "…"


class BodyLimit:
    """Answers 413 to bodies of more than `max_body_bytes`, announced or not."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, counting its bytes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(cast("list[tuple[bytes, bytes]]", scope["headers"])).get(
            b"content-length", b""
        )
        if announced.isdigit() and int(announced[:20]) > self._max_body_bytes:
            failure = failure_of(self._too_large(announced.decode()))
            await failure.response()(scope, receive, send)
            return
        seen_bytes = 0

        async def counted() -> Message:
            nonlocal seen_bytes
            message = await receive()
            if message["type"] == "http.request":
                seen_bytes += len(message.get("body", b""))
                if seen_bytes > self._max_body_bytes:
                    raise self._too_large(f"more than {self._max_body_bytes}")
            return message

        await self._app(scope, counted, send)

    def _too_large(self, size: str) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the body has {size[:20]} bytes; this server takes {self._max_body_bytes}",
            hint="send less, or start the server with a larger max_body_bytes",
        )
