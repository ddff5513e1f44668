"""Everything that can go wrong for a client, as a small hierarchy.

Code raises these; `triptych.rpc.status` alone turns them into gRPC statuses and back. `reason` is part of the API
(docs/errors.md); the message names what the caller can do.
"""


class TriptychError(Exception):
    """Base of all errors a client may see.

    Attributes:
        message: For people: what is wrong and which knob or change helps. Never holds prompt text or image data.
        reason: Stable identifier, UPPER_SNAKE_CASE, sent as google.rpc.ErrorInfo.reason.
    """

    default_reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason


class InvalidRequest(TriptychError):
    """The request can never succeed as it is (INVALID_ARGUMENT)."""

    default_reason = "INVALID_REQUEST"


class InvalidImage(InvalidRequest):
    """An image cannot be used (INVALID_ARGUMENT); `reason` says which way."""

    default_reason = "IMAGE_CORRUPT"


class Overloaded(TriptychError):
    """No room now; the same request may succeed later (RESOURCE_EXHAUSTED)."""

    default_reason = "OVERLOADED"


class Unavailable(TriptychError):
    """A service that is needed does not answer (UNAVAILABLE)."""

    default_reason = "SERVICE_UNAVAILABLE"


class EncoderChanged(Unavailable):
    """A version of the vision encoder is no longer served; the image must be named anew (UNAVAILABLE)."""

    default_reason = "ENCODER_CHANGED"


class StageTimeout(TriptychError):
    """A stage missed its deadline (DEADLINE_EXCEEDED)."""

    default_reason = "STAGE_TIMEOUT"


class FeaturesRequired(TriptychError):
    """An image came without features and its KV is not cached (FAILED_PRECONDITION)."""

    default_reason = "FEATURES_REQUIRED"


class Cancelled(TriptychError):
    """The caller gave up (CANCELLED)."""

    default_reason = "CANCELLED"


class IntegrityError(TriptychError):
    """A resource holder's books do not add up: a bug (INTERNAL)."""

    default_reason = "INTEGRITY"
