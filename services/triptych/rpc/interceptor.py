"""The one place where an exception becomes a gRPC status."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

from triptych.errors import TriptychError
from triptych.rpc.status import to_status

log = logging.getLogger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps TriptychError to its status, and anything else to INTERNAL without leaking its text to the client."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps unary and server-streaming handlers; there are no client-streaming ones."""
        handler = await continuation(handler_call_details)
        if handler is None:  # An unknown method: gRPC answers UNIMPLEMENTED itself.
            return handler
        method = handler_call_details.method
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary, method), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, method), handler.request_deserializer, handler.response_serializer
            )
        return handler


def _unary(behaviour: Any, method: str) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            await _abort(error, method, context)

    return call


def _stream(behaviour: Any, method: str) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(request, context):
                yield response
        except Exception as error:
            await _abort(error, method, context)

    return call


async def _abort(error: Exception, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):  # The handler aborted by itself (health, reflection).
        raise error
    if not isinstance(error, TriptychError):
        log.error("%s failed", method, exc_info=error)
        error = TriptychError(f"internal error ({type(error).__name__}); the service's log has the details")
    await context.abort_with_status(to_status(error))
