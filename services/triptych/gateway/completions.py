"""POST /v1/chat/completions and POST /v1/completions."""

from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from triptych.gateway import sse, translate
from triptych.gateway.answering import Answering
from triptych.gateway.edge import RequestContext
from triptych.gateway.errors import ApiError, to_json
from triptych.gateway.metrics import Recorder
from triptych.gateway.replies import ChatCompletion, Completion, error_responses, stream_response
from triptych.gateway.schemas import ChatCompletionRequest, CompletionRequest, SamplingRequest
from triptych.gateway.services import Services
from triptych.gateway.shapes import ChatShape, Shape, TextShape
from triptych.v1 import inference_pb2

_FAILURES = error_responses(400, 401, 404, 408, 413, 429, 500, 503, 504)


def completions_router(services: Services) -> APIRouter:
    """Returns the two routes."""
    router = APIRouter(prefix="/v1")

    @router.post(
        "/chat/completions",
        responses={**stream_response(ChatCompletion, "chat.completion.chunk"), **_FAILURES},
        summary="Answers a dialogue with pictures",
    )
    async def chat(request: Request, body: ChatCompletionRequest) -> Response:
        context = _context(request, body)
        await _check_model(services, body.model)
        _check_choices(services, body.n or 1)
        fetching = services.pictures.fetch_all(translate.linked_pictures(body))
        pictures = await sse.while_connected(request.receive, fetching)
        requests = translate.chat_requests(body, pictures, context.tenant, context.request_id)
        return await _answer(services, request, body, requests, ChatShape(bool(body.logprobs)))

    @router.post(
        "/completions",
        responses={**stream_response(Completion, "text_completion"), **_FAILURES},
        summary="Continues texts",
    )
    async def complete(request: Request, body: CompletionRequest) -> Response:
        context = _context(request, body)
        await _check_model(services, body.model)
        _check_choices(services, (body.n or 1) * len(body.prompt))
        requests = translate.completion_requests(body, context.tenant, context.request_id)
        return await _answer(services, request, body, requests, TextShape(body.logprobs is not None))

    return router


def _context(request: Request, body: SamplingRequest) -> RequestContext:
    context: RequestContext = request.scope["triptych"]
    if body.triptych is not None and body.triptych.request_id:
        context.request_id = body.triptych.request_id
    return context


async def _check_model(services: Services, name: str) -> None:
    """Raises ApiError (404) unless the model is served."""
    served = (await services.router.model()).name
    if name != served:
        raise ApiError(
            404, f"The model `{name}` does not exist; served: `{served}`", param="model", code="model_not_found"
        )


def _check_choices(services: Services, count: int) -> None:
    limit = services.settings.max_choices
    if count > limit:
        raise ApiError(400, f"{count} answers are more than max_choices={limit}", param="n", code="invalid_value")


async def _answer(
    services: Services,
    request: Request,
    body: SamplingRequest,
    requests: Sequence[inference_pb2.GenerateRequest],
    shape: Shape,
) -> Response:
    context: RequestContext = request.scope["triptych"]
    timeout_s = services.settings.request_timeout_s
    if body.triptych is not None and body.triptych.timeout_s is not None:
        timeout_s = min(timeout_s, body.triptych.timeout_s)
    answering = Answering(
        [services.router.generate(message, timeout_s, context.trace) for message in requests],
        shape,
        Recorder(services.metrics, context.arrival_s),
        request_id=context.request_id,
        model=body.model,
        choices_per_prompt=body.n or 1,
    )
    if not body.stream:
        if body.stream_options is not None:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options", code="invalid_value")
        reply = await sse.while_connected(request.receive, answering.whole())
        return Response(to_json(reply), media_type="application/json")
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    pieces = answering.pieces(include_usage)
    try:
        # What fails before the first event still has an HTTP status of its own.
        first = await sse.while_connected(request.receive, _next(pieces))
    except BaseException:
        await pieces.aclose()
        raise
    return sse.EventStream(_chained(first, pieces))


async def _next(pieces: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(pieces)


async def _chained(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for piece in rest:
            yield piece
    finally:
        await rest.aclose()
