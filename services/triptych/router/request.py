"""One request on its way through the router: what the steps read and write."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry.context import Context

from triptych import tensors
from triptych.errors import StageTimeout
from triptych.router.holding import Hold
from triptych.v1 import generation_pb2, inference_pb2, worker_pb2
from triptych.vision.cache import Lease
from triptych.vision.preprocess import Pixels
from triptych.vision.reduction_spec import Reduction, to_message
from triptych.vision.scheduler import EncodeClass

if TYPE_CHECKING:
    from triptych.router.drafting import Draft

_CLASSES: dict[int, EncodeClass] = {
    generation_pb2.PRIORITY_INTERACTIVE: EncodeClass.INTERACTIVE,
    generation_pb2.PRIORITY_ECONOMY: EncodeClass.ECONOMY,
}


@dataclass(slots=True)
class ImageState:
    """One image, filled in step by step.

    Attributes:
        source: As sent: encoded bytes, or a URL.
        requested: The inference_pb2.ImageDetail that was asked for, HIGH where none was.
        detail: The one it is encoded at; set by preprocess.
        resolution_reason: An inference_pb2.ResolutionReason; set by preprocess.
        encoded: The encoded file; set by intake, dropped by preprocess.
        width, height: Of the upright picture, in pixels; set by preprocess.
        side: Of the square the encoder sees, in pixels; set by preprocess.
        encoder_tokens: Visual tokens that the encoder gives; set by preprocess.
        reduction: What makes them fewer, None when nothing does; set by preprocess.
        encoder_version: The version that identity and features are of; set by preprocess.
        pixels: The encoder's input; set by preprocess.
        encoder_identity: 32 bytes, of the features as the encoder gives them; set by preprocess.
        identity: 32 bytes, of the features as the worker gets them; set by preprocess.
        feature_source: An inference_pb2.FeatureSource; set by probe or encode.
        lease: Features held in the encoder cache; set by encode, released when the worker has them.
        draft_identity, draft_lease: The same of a draft encoder's features, while a draft waits for its verdict.
    """

    source: bytes | str
    requested: int
    detail: int = inference_pb2.IMAGE_DETAIL_UNSPECIFIED
    resolution_reason: int = inference_pb2.RESOLUTION_REASON_UNSPECIFIED
    encoded: bytes | None = None
    width: int = 0
    height: int = 0
    side: int = 0
    encoder_tokens: int = 0
    reduction: Reduction | None = None
    encoder_version: str = ""
    pixels: Pixels | None = None
    encoder_identity: bytes = b""
    identity: bytes = b""
    feature_source: int = inference_pb2.FEATURE_SOURCE_UNSPECIFIED
    lease: Lease | None = None
    draft_identity: bytes = b""
    draft_lease: Lease | None = None

    @property
    def token_count(self) -> int:
        """Visual tokens in the prompt."""
        return self.encoder_tokens if self.reduction is None else self.reduction.tokens

    def release(self) -> None:
        """Gives the features up."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def release_draft(self) -> None:
        """Gives the draft encoder's features up."""
        if self.draft_lease is not None:
            self.draft_lease.release()
            self.draft_lease = None

    def report(self) -> inference_pb2.ImageReport:
        """Returns what the client is told about the image."""
        # The encoder may have been done while the worker took the draft.
        source = inference_pb2.FEATURE_SOURCE_DRAFT if self.draft_lease is not None else self.feature_source
        dropped = source == inference_pb2.FEATURE_SOURCE_UNSPECIFIED
        report = inference_pb2.ImageReport(
            identity=self.identity.hex(),
            width=self.width,
            height=self.height,
            encoded_side=self.side,
            visual_tokens=0 if dropped else self.token_count,
            source=inference_pb2.FeatureSource.ValueType(source),
            detail=inference_pb2.ImageDetail.ValueType(self.detail),
            resolution_reason=inference_pb2.ResolutionReason.ValueType(self.resolution_reason),
            encoder_tokens=self.encoder_tokens,
        )
        if self.reduction is not None:
            report.reduction.CopyFrom(to_message(self.reduction))
        return report


@dataclass(slots=True)
class RequestState:
    """A request in flight.

    Attributes:
        request: As sent, already validated.
        request_id: The client's, or one made for it.
        trace: Context whose current span is the request's root span.
        deadline_s: When the client gives up, on time.monotonic's clock; None: never.
        arrival_s: When it arrived, on the same clock.
        answered: To be called at the first token.
        hold: Room for the images' pixels and features; set by preprocess, given back at the first token.
        reduction: What makes the images' tokens fewer, where they have more; set by intake.
        images: In prompt order.
        images_dropped: Whether the answer is text-only because encoding was late.
        durations: Of the stages so far.
        degradations: What was not done as asked, so far.
        draft: What the answer was begun with, until its verdict; set by encode.
        draft_report: What became of it; None when no image needed encoding or no draft was asked for.
    """

    request: inference_pb2.GenerateRequest
    trace: Context
    deadline_s: float | None = None
    request_id: str = ""
    arrival_s: float = field(default_factory=time.monotonic)
    answered: Callable[[], None] = field(default=lambda: None)
    hold: Hold | None = None
    reduction: Reduction | None = None
    images: list[ImageState] = field(default_factory=list)
    images_dropped: bool = False
    durations: generation_pb2.StageDurations = field(default_factory=generation_pb2.StageDurations)
    degradations: list[inference_pb2.Degradation] = field(default_factory=list)
    draft: "Draft | None" = None
    draft_report: inference_pb2.DraftReport | None = None

    def __post_init__(self) -> None:
        self.request_id = self.request_id or self.request.request_id or uuid.uuid4().hex

    def first_token(self) -> None:
        """Notes that the first token has come: the images are not needed any more. May be called more than once."""
        if self.durations.time_to_first_token.ToNanoseconds() == 0:
            self.durations.time_to_first_token.FromNanoseconds(self.elapsed_ns())
        self.answered()
        if self.draft is None:
            self.give_up_images()

    async def drop_draft(self) -> None:
        """Ends a draft without a verdict and waits until nothing of it runs; does nothing when there is none."""
        draft, self.draft = self.draft, None
        if draft is not None:
            draft.target.cancel()
            await asyncio.gather(draft.target, return_exceptions=True)
            self.release()

    def give_up_images(self) -> None:
        """Drops pixels and features; may be called more than once."""
        self.release()
        for image in self.images:
            image.pixels = None
        if self.hold is not None:
            self.hold.release()
            self.hold = None

    def start_over(self) -> None:
        """Forgets what the steps have found out, so that they can run again."""
        self.give_up_images()
        self.images.clear()
        self.degradations.clear()

    @property
    def degradable(self) -> bool:
        """Whether the client prefers a worse answer over an error."""
        return self.request.degradation_policy != inference_pb2.DEGRADATION_POLICY_FORBID

    @property
    def encode_class(self) -> EncodeClass:
        """Its class in the encoder's queue."""
        return _CLASSES.get(self.request.priority, EncodeClass.STANDARD)

    def within_deadline(self, timeout_s: float) -> float:
        """Returns a stage's time limit in seconds, cut to what the client's deadline leaves.

        Raises StageTimeout (CLIENT_DEADLINE) when that is nothing.
        """
        if self.deadline_s is None:
            return timeout_s
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise StageTimeout("the call's deadline has passed", reason="CLIENT_DEADLINE")
        return min(timeout_s, left_s)

    def check_deadline(self) -> None:
        """Raises StageTimeout (CLIENT_DEADLINE) when the client's deadline has passed."""
        self.within_deadline(0.0)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time spent inside to the field `stage` of `durations`, failures included."""
        start = time.monotonic()
        try:
            yield
        finally:
            spent = getattr(self.durations, stage)
            spent.FromNanoseconds(spent.ToNanoseconds() + int((time.monotonic() - start) * 1e9))

    def elapsed_ns(self) -> int:
        """Returns nanoseconds since arrival."""
        return int((time.monotonic() - self.arrival_s) * 1e9)

    def release(self) -> None:
        """Gives up everything the request holds; may be called more than once."""
        for image in self.images:
            image.release()
            image.release_draft()

    def prompt(self) -> worker_pb2.Prompt:
        """Returns the dialogue for the worker, without features; without images too, once they were dropped.

        A message of nothing but dropped images keeps its place with an empty text.
        """
        prompt = worker_pb2.Prompt(cache_salt=self.request.cache_salt, raw=self.request.raw_prompt)
        index = 0
        for message in self.request.messages:
            turn = prompt.messages.add(role=message.role)
            for part in message.parts:
                if part.HasField("text"):
                    turn.parts.add(text=part.text)
                elif not self.images_dropped:
                    turn.parts.add(image_index=index)
                    index += 1
            if not turn.parts:
                turn.parts.add(text="")
        if not self.images_dropped:
            for image in self.images:
                prompt.images.add(identity=image.identity, token_count=image.token_count)
        return prompt

    def worker_request(self, shared: ExitStack | None) -> worker_pb2.WorkerGenerateRequest:
        """Returns what the worker is asked, with the features that are held.

        Features go inline, or, when `shared` is given, through shared memory that lives until that stack closes.
        """
        prompt = self.prompt()
        for image, sent in zip(self.images, prompt.images, strict=False):
            lease = image.draft_lease or image.lease
            if lease is not None:
                sent.features.CopyFrom(tensors.sent(lease.features, shared))
            if image.draft_lease is not None:
                sent.identity = image.draft_identity
        request = worker_pb2.WorkerGenerateRequest(
            request_id=self.request_id,
            prompt=prompt,
            sampling=self.request.sampling,
            stopping=self.request.stopping,
            priority=self.request.priority,
            visual_kv=self.request.visual_kv,
        )
        if self.draft is not None:
            request.draft.CopyFrom(worker_pb2.Draft(id=self.draft.name, early_text=self.request.draft.early_text))
        return request
