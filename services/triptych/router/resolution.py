"""Chooses the resolution of each image by the load of the moment, and says so."""

import time
from collections.abc import Callable

from prometheus_client import Counter

from triptych.config import RouterSettings
from triptych.errors import Overloaded
from triptych.router.request import RequestState
from triptych.v1 import generation_pb2, inference_pb2
from triptych.vision.resolution import Ceiling, Load, Thresholds, choose_detail, next_ceiling


class ResolutionManager:
    """Follows the load and lowers what requests ask for; never raises it. Used from one event loop only."""

    def __init__(
        self,
        settings: RouterSettings,
        load: Callable[[], Load],
        counter: Counter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` is asked at each choice; `counter` has the labels detail and reason."""
        self._thresholds = Thresholds(
            settings.low_headroom,
            settings.medium_headroom,
            settings.low_pending,
            settings.medium_pending,
            settings.resolution_hold_s,
        )
        self._by_load = settings.resolution_by_load
        self._load = load
        self._counter = counter
        self._clock = clock
        self._ceiling = Ceiling()

    def choose(self, state: RequestState) -> None:
        """Sets each image's detail and its reason.

        Raises Overloaded (RESOLUTION_LOWERED) when load lowers one and the request forbids it.
        """
        if self._by_load:
            self._ceiling = next_ceiling(self._ceiling, self._load(), self._thresholds, self._clock())
        economy = state.degradable and state.request.priority == generation_pb2.PRIORITY_ECONOMY
        for image in state.images:
            image.detail, image.resolution_reason = choose_detail(image.requested, self._ceiling, economy=economy)
            if image.detail != image.requested and not state.degradable:
                raise Overloaded(
                    f"{_CAUSES[image.resolution_reason]}, so images get at most {detail_name(image.detail)} "
                    "resolution, and the request forbids that; try again later",
                    reason="RESOLUTION_LOWERED",
                )

    def note(self, state: RequestState) -> None:
        """Counts the resolutions that images were prepared at, and tells the client when one is lower than asked."""
        for image in state.images:
            self._counter.labels(detail_name(image.detail), reason_name(image.resolution_reason)).inc()
        lowered = [image for image in state.images if image.detail != image.requested]
        if lowered:
            state.degradations.append(
                inference_pb2.Degradation(
                    kind=inference_pb2.DEGRADATION_KIND_LOWER_RESOLUTION,
                    explanation=f"{len(lowered)} of {len(state.images)} images at {detail_name(lowered[0].detail)} "
                    f"resolution: {_CAUSES[lowered[0].resolution_reason]}",
                )
            )


_CAUSES: dict[int, str] = {
    inference_pb2.RESOLUTION_REASON_MEMORY: "little device memory is left (low_headroom, medium_headroom)",
    inference_pb2.RESOLUTION_REASON_PENDING: "many requests wait for their first token (low_pending, medium_pending)",
    inference_pb2.RESOLUTION_REASON_ECONOMY: "requests of PRIORITY_ECONOMY get one step less",
}


def detail_name(detail: int) -> str:
    """Returns an ImageDetail in lower case: high, medium, low, thumbnail."""
    name = inference_pb2.ImageDetail.Name(inference_pb2.ImageDetail.ValueType(detail))
    return name.removeprefix("IMAGE_DETAIL_").lower()


def reason_name(reason: int) -> str:
    """Returns a ResolutionReason in lower case: requested, memory, pending, economy."""
    name = inference_pb2.ResolutionReason.Name(inference_pb2.ResolutionReason.ValueType(reason))
    return name.removeprefix("RESOLUTION_REASON_").lower()
