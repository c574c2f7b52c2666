"""What does /openapi.json say of bodies and answers?

Routes read their bodies themselves and answer with encoded structs, so the schema is put together here: request
bodies from pydantic, answers from msgspec, both under `components/schemas`.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tokamak.server.protocol.answers import ErrorBody

JsonObject = dict[str, Any]

_PLACE = "#/components/schemas/"

_ERRORS = {
    400: "A field is wrong; `param` names it",
    401: "No valid API key",
    404: "No such model",
    413: "The body is too large",
    500: "The server failed",
    503: "Loading, full or shutting down; see Retry-After",
}

_BODY_ERRORS = {400, 413}


def takes(model: type[BaseModel]) -> JsonObject:
    """The `openapi_extra` of a route that reads this body."""
    content = {"application/json": {"schema": _ref(model.__name__)}}
    return {"requestBody": {"required": True, "content": content}}


def path_parameter(name: str, description: str) -> JsonObject:
    """The `openapi_extra` of a route with this part in its path."""
    schema = {"type": "string", "minLength": 1}
    parameter = {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": schema,
    }
    return {"parameters": [parameter]}


def answers(
    answer: type[msgspec.Struct],
    *,
    stream: type[msgspec.Struct] | None = None,
    unwell: type[msgspec.Struct] | None = None,
    body: bool = True,
) -> dict[int | str, JsonObject]:
    """The `responses` of a route: its answer, or the events of its stream, and its errors.

    `unwell` replaces the errors of a health route by its own 503.
    """
    content: JsonObject = {"application/json": {"schema": _ref(answer.__name__)}}
    if stream is not None:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": f"Events whose data is a {stream.__name__}; the last is [DONE].",
            }
        }
    made: dict[int | str, JsonObject] = {200: {"description": "The answer", "content": content}}
    if unwell is not None:
        bad = {"application/json": {"schema": _ref(unwell.__name__)}}
        made[503] = {"description": "Not so; `reason` says why", "content": bad}
        return made
    for status, description in _ERRORS.items():
        if body or status not in _BODY_ERRORS:
            error = {"application/json": {"schema": _ref(ErrorBody.__name__)}}
            made[status] = {"description": description, "content": error}
    return made


def describe(
    app: FastAPI, bodies: list[type[BaseModel]], structs: list[type[msgspec.Struct]]
) -> JsonObject:
    """The whole schema of an app whose routes use these bodies and answers."""
    schema: JsonObject = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, requests = models_json_schema(
        [(model, "validation") for model in bodies], ref_template=_PLACE + "{model}"
    )
    _, responses = msgspec.json.schema_components(structs, ref_template=_PLACE + "{name}")
    components: JsonObject = schema.setdefault("components", {})
    schemas = cast("JsonObject", components.setdefault("schemas", {}))
    schemas.update(cast("JsonObject", requests["$defs"]))
    schemas.update(responses)
    return schema


def _ref(name: str) -> JsonObject:
    return {"$ref": _PLACE + name}
