"""Which resolution an image is encoded at: what was asked for, or less under load. Pure."""

from dataclasses import dataclass
from fractions import Fraction

from triptych.v1 import inference_pb2
from triptych.vision.encoder_spec import EncoderSpec

Detail = int
"""An inference_pb2.ImageDetail; a higher number is a lower resolution."""

HIGH, MEDIUM, LOW, THUMBNAIL = (
    inference_pb2.IMAGE_DETAIL_HIGH,
    inference_pb2.IMAGE_DETAIL_MEDIUM,
    inference_pb2.IMAGE_DETAIL_LOW,
    inference_pb2.IMAGE_DETAIL_THUMBNAIL,
)

SHARES: dict[Detail, Fraction] = {
    inference_pb2.IMAGE_DETAIL_UNSPECIFIED: Fraction(1),
    HIGH: Fraction(1),
    MEDIUM: Fraction(2, 3),
    LOW: Fraction(1, 2),
    THUMBNAIL: Fraction(1, 3),
}
"""Shares of the encoder's native side."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the rule looks at.

    Attributes:
        headroom: Share of the worker's device memory for KV that no running request holds, 0 to 1.
        pending: Requests that have not got their first token.
    """

    headroom: float
    pending: int


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The rule's knobs; config.py describes them.

    Attributes:
        low_headroom, medium_headroom: Below them, at most low or medium.
        low_pending, medium_pending: Above them, the same.
        hold_s: How long the load must have eased before the ceiling rises again.
    """

    low_headroom: float = 0.2
    medium_headroom: float = 0.4
    low_pending: int = 20
    medium_pending: int = 10
    hold_s: float = 2.0

    def eased(self) -> "Thresholds":
        """Returns the stricter thresholds under which load counts as eased: a tenth of memory, a fifth of requests."""
        return Thresholds(
            self.low_headroom + 0.1,
            self.medium_headroom + 0.1,
            self.low_pending * 4 // 5,
            self.medium_pending * 4 // 5,
            self.hold_s,
        )


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The highest resolution that load allows now.

    Attributes:
        detail: It.
        reason: An inference_pb2.ResolutionReason: which load lowered it, or REQUESTED when none did.
        eased_since_s: Since when a higher one would do; None: it would not.
    """

    detail: Detail = HIGH
    reason: int = inference_pb2.RESOLUTION_REASON_REQUESTED
    eased_since_s: float | None = None


def ceiling_at(load: Load, thresholds: Thresholds) -> tuple[Detail, int]:
    """Returns the highest resolution under a load, and the reason: memory before pending requests."""
    memory, pending = inference_pb2.RESOLUTION_REASON_MEMORY, inference_pb2.RESOLUTION_REASON_PENDING
    if load.headroom < thresholds.low_headroom:
        return LOW, memory
    if load.pending > thresholds.low_pending:
        return LOW, pending
    if load.headroom < thresholds.medium_headroom:
        return MEDIUM, memory
    if load.pending > thresholds.medium_pending:
        return MEDIUM, pending
    return HIGH, inference_pb2.RESOLUTION_REASON_REQUESTED


def next_ceiling(present: Ceiling, load: Load, thresholds: Thresholds, now_s: float) -> Ceiling:
    """Returns the ceiling after a look at the load: lowered at once, raised when the load has eased for hold_s."""
    detail, reason = ceiling_at(load, thresholds)
    if detail > present.detail:
        return Ceiling(detail, reason)
    eased_detail, eased_reason = ceiling_at(load, thresholds.eased())
    if eased_detail >= present.detail:
        return Ceiling(present.detail, present.reason)
    since_s = now_s if present.eased_since_s is None else present.eased_since_s
    if now_s - since_s >= thresholds.hold_s:
        return Ceiling(eased_detail, eased_reason)
    return Ceiling(present.detail, present.reason, since_s)


def choose_detail(requested: Detail, ceiling: Ceiling, *, economy: bool) -> tuple[Detail, int]:
    """Returns the resolution for an image and its reason: never higher than requested, one step lower for economy."""
    requested = requested or HIGH
    detail: Detail = requested
    reason: int = inference_pb2.RESOLUTION_REASON_REQUESTED
    if ceiling.detail > requested:
        detail, reason = ceiling.detail, ceiling.reason
    if economy and detail < THUMBNAIL:
        detail += 1
        if reason == inference_pb2.RESOLUTION_REASON_REQUESTED:
            reason = inference_pb2.RESOLUTION_REASON_ECONOMY
    return detail, reason


def encoded_side(detail: Detail, spec: EncoderSpec) -> int:
    """Returns the side in pixels for an ImageDetail: its share of the native side in whole patches.

    The nearest number of patches, halves rounded up, at least one: 336, 224, 168 and 112 px for a ViT/14 at 336.
    """
    patches = (spec.image_side // spec.patch_size) * SHARES[detail]
    return max(1, int(patches + Fraction(1, 2))) * spec.patch_size
