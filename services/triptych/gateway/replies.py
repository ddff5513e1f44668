"""What clients get, for the OpenAPI document. shapes.py and reports.py build replies; a test compares the two."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from triptych.gateway.errors import ErrorReply
from triptych.visual_kv import VisualKvPolicy


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="found in the worker's KV cache and not computed again")


class Usage(BaseModel):
    """Token counts; visual tokens are prompt tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ImageReport(BaseModel):
    """How a picture was used."""

    width: int
    height: int
    encoded_side: int = Field(description="side of the square the encoder saw, in pixels")
    detail: Literal["high", "medium", "low", "thumbnail"] = Field(description="the resolution it was encoded at")
    resolution_reason: Literal["requested", "memory", "pending", "economy"] = Field(
        description="why that resolution: as asked for, or less because of load or priority"
    )
    visual_tokens: int
    encoder_tokens: int = Field(description="visual tokens before any reduction")
    reduction: str | None = Field(description="what made them fewer, such as kmeans:128; null when nothing did")
    source: Literal["encoder", "encoder_cache", "kv_cache", "draft", "dropped"]


class TokenCounts(BaseModel):
    """Token counts by kind."""

    text_tokens: int
    visual_tokens: int
    cached_tokens: int
    output_tokens: int


class DraftReport(BaseModel):
    """What became of a draft encoder's features."""

    outcome: Literal["kept", "rejected", "unneeded", "unavailable", "unverified"]
    similarity: float | None = Field(description="mean cosine of a picture's tokens to the encoder's")
    lowest_similarity: float | None = Field(description="of the least similar token")
    drafted_tokens: int


class DegradationReport(BaseModel):
    """Something done worse than asked."""

    kind: str
    explanation: str


class VisualKvReport(BaseModel):
    """What became of the pictures' KV."""

    policy: VisualKvPolicy
    lossy: bool = Field(description="whether the policy may have changed the answer")
    saved_bytes: int = Field(description="device memory that it saved, at most")


class Report(BaseModel):
    """Triptych's own part of a reply; with several choices, that of the first."""

    request_id: str
    trace_id: str | None
    images: list[ImageReport]
    timings: dict[str, float] = Field(description="seconds per stage, for the stages that happened")
    usage: TokenCounts
    draft: DraftReport | None = Field(description="null when there was none")
    degradations: list[DegradationReport]
    visual_kv: VisualKvReport


class LogprobEntry(BaseModel):
    """A token and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(LogprobEntry):
    """A generated token with the likely ones at its place."""

    top_logprobs: list[LogprobEntry]


class ChatLogprobs(BaseModel):
    """How likely each token of an answer was."""

    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """A whole answer to a dialogue."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    triptych: Report


class TextLogprobs(BaseModel):
    """How likely each token of a continuation was."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """Whole continuations of texts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    triptych: Report


class ModelReport(BaseModel):
    """What a client may want to know before it asks."""

    fingerprint: str
    context_tokens: int
    native_image_side: int
    native_visual_tokens: int
    max_images: int
    encoder_version: str


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["triptych"]
    triptych: ModelReport


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """Whether the gateway lives, or a request would be served."""

    status: Literal["ok", "not ready"]


_ERRORS = {
    400: "the request can never succeed as it is",
    401: "no valid API key",
    404: "unknown model",
    408: "the body, or the answer, did not come within the request's time",
    413: "the body is too large",
    429: "no room now; Retry-After says when to try again",
    500: "a fault of ours",
    503: "a service that is needed does not answer",
    504: "a stage missed its deadline",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns FastAPI's description of error replies."""
    return {status: {"model": ErrorReply, "description": _ERRORS[status]} for status in statuses}


def stream_response(model: type[BaseModel], what: str) -> dict[int | str, dict[str, Any]]:
    """Returns FastAPI's description of a reply that is JSON, or server-sent events with `stream`."""
    told = f"a {what} as JSON, or {{error}}, or [DONE] at the end"
    event = {"type": "object", "properties": {"data": {"type": "string", "description": told}}, "required": ["data"]}
    stream = {"schema": event}
    return {200: {"model": model, "content": {"text/event-stream": stream}}}
