"""Every error in OpenAI's shape: {"error": {"message", "type", "param", "code"}} with its HTTP status."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from triptych import errors

RETRY_AFTER_S = 1
"""What a client is told to wait when there is no room now."""
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it: the status of a request whose client has gone, for logs and metrics (nginx's number)."""

_CONTEXT_EXCEEDED = "context_length_exceeded"
_WHOLE_CALL_REASONS = ("CLIENT_DEADLINE", "STAGE_TIMEOUT")
# What gRPC itself says of these is of no use to a client of ours.
_WORDS = {
    "SERVICE_UNAVAILABLE": "the router does not answer; try again later",
    "STAGE_TIMEOUT": "the answer was not complete in time: request_timeout_s, or the request's own triptych.timeout_s",
}

ErrorType = Literal["invalid_request_error", "rate_limit_error", "timeout_error", "server_error"]


class ErrorDetail(BaseModel):
    """What went wrong, for people and for programs."""

    message: str
    type: ErrorType
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Body of every answer that is not 2xx."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An error as the client will see it.

    Attributes:
        body: The reply's body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: ErrorType = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.body = ErrorReply(error=ErrorDetail(message=message, type=type, param=param, code=code))

    def response(self) -> Response:
        """Returns the HTTP response."""
        return Response(self.body.model_dump_json(), self.status_code, self.headers, "application/json")

    def event(self) -> bytes:
        """Returns the event that ends a stream which had begun."""
        return f"data: {self.body.model_dump_json()}\n\n".encode()


def unsupported(param: str, why: str) -> ApiError:
    """Returns the refusal of something that OpenAI's API has and this server does not."""
    return ApiError(400, f"{param} {why}", param=param, code="unsupported_parameter")


def overloaded(message: str) -> ApiError:
    """Returns the refusal of a request for which there is no room now."""
    return ApiError(
        429, message, type="rate_limit_error", code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)}
    )


def from_triptych(error: errors.TriptychError) -> ApiError:
    """Returns the HTTP form of an error of the router's; `code` is its reason in lower case."""
    code, message = error.reason.lower(), _WORDS.get(error.reason, error.message)
    if isinstance(error, errors.InvalidRequest):
        if error.reason == "PROMPT_TOO_LONG":
            return ApiError(400, message, param="messages", code=_CONTEXT_EXCEEDED)
        return ApiError(400, message, code=code)
    if isinstance(error, errors.Overloaded):
        return ApiError(429, message, type="rate_limit_error", code=code, headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, errors.Unavailable):
        return ApiError(503, message, type="server_error", code=code, headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, errors.StageTimeout):
        whole_call = error.reason in _WHOLE_CALL_REASONS
        return ApiError(408 if whole_call else 504, message, type="timeout_error", code=code)
    if isinstance(error, errors.Cancelled):
        return ApiError(CLIENT_CLOSED_REQUEST, message, code=code)
    return ApiError(500, message, type="server_error", code=code)


def from_http(error: HTTPException, method: str, path: str) -> ApiError:
    """Returns the form of what the web framework raises by itself."""
    if isinstance(error, ApiError):
        return error
    if error.status_code == 404:
        return ApiError(404, f"Invalid URL ({method} {path})", code="unknown_url")
    if error.status_code == 405:
        return ApiError(
            405, f"Not allowed to {method} on {path}", code="method_not_supported", headers=error.headers or {}
        )
    kind: ErrorType = "invalid_request_error" if error.status_code < 500 else "server_error"
    return ApiError(error.status_code, str(error.detail), type=kind, headers=error.headers or {})


def from_validation(problems: Sequence[Any]) -> ApiError:
    """Returns the first of pydantic's complaints about a body, with the member's path as `param`."""
    problem = problems[0]
    kind, path = problem["type"], _path(problem["loc"])
    if kind == "json_invalid":
        return ApiError(400, "The body is not valid JSON", code="invalid_json")
    if not path:
        return ApiError(
            400, "The body must be a JSON object, sent with Content-Type: application/json", code="invalid_body"
        )
    if kind == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {path}", param=path, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: '{path}'", param=path, code="missing_required_parameter")
    message = problem["msg"].removeprefix("Value error, ")
    return ApiError(400, f"Invalid value for '{path}': {message}", param=path, code="invalid_value")


def internal(error: BaseException) -> ApiError:
    """Returns what a client is told about a fault of ours: its kind, none of its text."""
    return ApiError(
        500,
        f"internal error ({type(error).__name__}); the gateway's log has the details",
        type="server_error",
        code="internal",
    )


def to_json(value: object) -> bytes:
    """Returns compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _path(location: Sequence[str | int]) -> str:
    """Returns a path such as messages[0].content[1].image_url.url.

    Pydantic names the chosen kind of a part after its index; the name is no member of the body.
    """
    steps = list(location[1:] if location and location[0] == "body" else location)
    path = ""
    for place, step in enumerate(steps):
        if isinstance(step, int):
            path += f"[{step}]"
        elif place > 1 and steps[place - 2] == "content" and step in ("text", "image_url"):
            continue
        else:
            path += f".{step}" if path else step
    return path
