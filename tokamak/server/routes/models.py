"""Which models does this server have?"""

from __future__ import annotations

from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response

from tokamak.server.openapi import answers, path_parameter
from tokamak.server.state import ServerState, server_state

router = APIRouter(tags=["openai"])


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model under one of its names."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["tokamak"] = "tokamak"
    root: str
    """The first of the served names, which responses carry if the client names none."""
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All names of this server's model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


@router.get("/v1/models", responses=answers(ModelList, body=False), response_model=None)
async def list_models(request: Request) -> Response:
    """All models, by the names clients may use."""
    state = server_state(request)
    names = state.engine().info.served_names
    listed = ModelList(data=[_card(state, name) for name in names])
    return Response(msgspec.json.encode(listed), media_type="application/json")


@router.get(
    "/v1/models/{model_id:path}",
    openapi_extra=path_parameter("model_id", "A served name; it may contain slashes."),
    responses=answers(ModelCard, body=False),
    response_model=None,
)
async def retrieve_model(request: Request) -> Response:
    """One model by name."""
    state = server_state(request)
    card = _card(state, state.model_name(str(request.path_params["model_id"])))
    return Response(msgspec.json.encode(card), media_type="application/json")


def _card(state: ServerState, name: str) -> ModelCard:
    info = state.engine().info
    return ModelCard(
        id=name,
        created=int(info.started_unix_s),
        root=info.served_names[0],
        max_model_len=info.max_model_len,
    )
