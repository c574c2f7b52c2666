"""Which HTTP status, and which body, does an error become?

Bodies are OpenAI's: `{"error": {"message", "type", "param", "code"}}`; a hint joins the message. What a client did
wrong is 4xx and names the field; what we did wrong is 5xx and is logged with the request's id by whoever caught it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
from starlette.responses import Response

from tokamak.errors import (
    ContextLengthError,
    EngineDeadError,
    GrammarError,
    ModelError,
    NotFoundError,
    OverloadedError,
    RequestError,
    TemplateError,
    TokamakError,
)
from tokamak.server.protocol.answers import ErrorBody, ErrorDetail

INVALID = "invalid_request_error"
CLIENT_CLOSED_REQUEST = 499
"""A status for logs and metrics: the client left, so nobody reads it."""


class UnknownFieldError(RequestError):
    """A body has a field that we do not know."""


class JsonError(RequestError):
    """A body is not JSON."""


class UnknownModelError(NotFoundError):
    """A request names a model this server does not have."""


class AuthenticationError(TokamakError):
    """No key, or a wrong one (HTTP 401)."""


class BodyTooLargeError(TokamakError):
    """A body has more bytes than the server takes (HTTP 413)."""


class NotLoadedError(TokamakError):
    """The engine is still loading, or could not be loaded (HTTP 503)."""


class AbortedError(TokamakError):
    """The engine stopped before a generation was done (HTTP 503)."""


class ClientGoneError(TokamakError):
    """The client closed its connection; the answer has no reader."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a client sees it."""

    status: int
    detail: ErrorDetail
    headers: dict[str, str] = field(default_factory=dict[str, str])

    def response(self) -> Response:
        """The HTTP response."""
        return Response(
            self.body(), self.status, headers=self.headers, media_type="application/json"
        )

    def body(self) -> bytes:
        """The JSON body, which is also the data of a stream's error event."""
        return msgspec.json.encode(ErrorBody(self.detail))


def failure_of(error: Exception) -> Failure:
    """The status, body and headers for an error; anything unknown is a 500 that tells no secrets."""
    match error:
        case RequestError():
            return _failure(400, error, INVALID, _request_code(error), param=error.field)
        case AuthenticationError():
            headers = {"WWW-Authenticate": "Bearer"}
            return _failure(401, error, INVALID, "invalid_api_key", headers=headers)
        case UnknownModelError():
            return _failure(404, error, INVALID, "model_not_found", param="model")
        case NotFoundError():
            return _failure(404, error, INVALID, "not_found")
        case BodyTooLargeError():
            return _failure(413, error, INVALID, "body_too_large")
        case ClientGoneError():
            return _failure(CLIENT_CLOSED_REQUEST, error, INVALID, "client_gone")
        case OverloadedError():
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return _failure(503, error, "server_error", "overloaded", headers=headers)
        case NotLoadedError():
            headers = {"Retry-After": "1"}
            return _failure(503, error, "server_error", "not_loaded", headers=headers)
        case AbortedError():
            return _failure(503, error, "server_error", "aborted", headers={"Retry-After": "5"})
        case EngineDeadError() | ModelError():
            return _failure(503, error, "server_error", "engine_dead")
        case TokamakError():
            return _failure(500, error, "server_error", "engine_error")
        case _:
            detail = ErrorDetail(
                "the server failed on this request; its log has the reason under the request id",
                "server_error",
                None,
                "internal_error",
            )
            return Failure(500, detail)


def _request_code(error: RequestError) -> str:
    match error:
        case ContextLengthError():
            return "context_length_exceeded"
        case GrammarError():
            return "invalid_grammar"
        case TemplateError():
            return "template_error"
        case UnknownFieldError():
            return "unknown_field"
        case JsonError():
            return "invalid_json"
        case _:
            return "invalid_value"


def _failure(
    status: int,
    error: TokamakError,
    kind: str,
    code: str,
    *,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> Failure:
    return Failure(status, ErrorDetail(str(error), kind, param, code), headers or {})
