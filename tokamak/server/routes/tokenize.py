"""How do clients ask for token ids, and for the text of ids?"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from tokamak.errors import RequestError
from tokamak.server.body import read_body
from tokamak.server.openapi import answers, takes
from tokamak.server.prompt import chat_prompt
from tokamak.server.protocol.tokenize import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from tokamak.server.state import server_state
from tokamak.server.tools import check_tools

router = APIRouter(tags=["tokens"])


@router.post(
    "/tokenize",
    openapi_extra=takes(TokenizeRequest),
    responses=answers(Tokenized),
    response_model=None,
)
async def tokenize(request: Request) -> Response:
    """The ids of a text, or of the prompt that messages become."""
    state = server_state(request)
    client = state.engine()
    body = await read_body(request, TokenizeRequest)
    state.model_name(body.model)
    body.check()
    if body.prompt is not None:
        text, add_special_tokens = body.prompt, body.add_special_tokens is not False
    else:
        check_tools(body.tools or ())
        text = chat_prompt(client.chat_template, body.messages or [], body, tools=body.tools)
        add_special_tokens = bool(body.add_special_tokens)
    encode = partial(client.tokenizer.encode, text, add_special_tokens=add_special_tokens)
    ids = await asyncio.to_thread(encode)
    answer = Tokenized(
        count=len(ids),
        max_model_len=client.info.max_model_len,
        tokens=ids,
        token_strs=[client.tokenizer.token_text(i) for i in ids]
        if body.return_token_strs
        else None,
    )
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post(
    "/detokenize",
    openapi_extra=takes(DetokenizeRequest),
    responses=answers(Detokenized),
    response_model=None,
)
async def detokenize(request: Request) -> Response:
    """The text of ids, special tokens included."""
    state = server_state(request)
    client = state.engine()
    body = await read_body(request, DetokenizeRequest)
    state.model_name(body.model)
    _check_ids(body.tokens, client.info.vocab_tokens)
    decode = partial(client.tokenizer.decode, body.tokens, skip_special_tokens=False)
    text = await asyncio.to_thread(decode)
    return Response(msgspec.json.encode(Detokenized(text)), media_type="application/json")


def _check_ids(ids: list[int], vocab_tokens: int) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < vocab_tokens):
        return
    at = next(at for at, token_id in enumerate(ids) if not 0 <= token_id < vocab_tokens)
    raise RequestError(
        f"tokens[{at}] is {ids[at]}; token ids of this model are 0 to {vocab_tokens - 1}",
        field=f"tokens[{at}]",
    )
