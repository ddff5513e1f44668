"""Errors to canonical gRPC statuses with google.rpc.ErrorInfo, and back. Nothing else makes a status."""

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from triptych import errors

DOMAIN = "triptych"

_CODES: dict[type[errors.TriptychError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.StageTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.FeaturesRequired: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
}
_CLASSES = {code: cls for cls, code in _CODES.items()}


def code_of(error: errors.TriptychError) -> grpc.StatusCode:
    """Returns the canonical code of an error: that of its nearest class, INTERNAL for the rest."""
    for cls in type(error).__mro__:
        if cls in _CODES:
            return _CODES[cls]
    return grpc.StatusCode.INTERNAL


def to_status(error: errors.TriptychError) -> grpc.Status:
    """Returns what `context.abort_with_status` takes: code, message and an ErrorInfo with reason and domain."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    code = code_pb2.Code.Value(code_of(error).name)
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code, message=error.message, details=[info]))
    return status


def from_rpc_error(error: grpc.RpcError) -> errors.TriptychError:
    """Returns the error a peer raised; statuses that are not ours (a lost connection, say) map by code alone."""
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
    details = error.details() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else str(error)
    cls = _CLASSES.get(code, errors.TriptychError)
    return cls(details or code.name, reason=_reason(error))


def _reason(error: grpc.RpcError) -> str | None:
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # The rich status contradicts the plain one: not ours.
        return None
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return str(info.reason)
    return None
