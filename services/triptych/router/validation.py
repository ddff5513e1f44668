"""What a request must look like before anything is done for it. Pure."""

import re
from collections.abc import Sequence

from triptych.config import RouterSettings
from triptych.errors import InvalidRequest
from triptych.v1 import generation_pb2, inference_pb2

MAX_SALT_BYTES = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 20
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{0,128}")


def validate(request: inference_pb2.GenerateRequest, settings: RouterSettings) -> None:
    """Raises InvalidRequest, with a reason for each kind of defect, unless the request keeps the contract.

    What only the worker can judge (the prompt's length in tokens) and what the image itself holds are checked later.
    """
    if not _REQUEST_ID.fullmatch(request.request_id):
        raise InvalidRequest(
            "request_id must be at most 128 characters of [A-Za-z0-9._:-]", reason="REQUEST_ID_INVALID"
        )
    if len(request.cache_salt.encode()) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt is longer than {MAX_SALT_BYTES} bytes", reason="CACHE_SALT_INVALID")
    _check_enum("priority", request.priority, generation_pb2.Priority.values())
    _check_enum("visual_kv", request.visual_kv, generation_pb2.VisualKvPolicy.values())
    _check_enum("degradation_policy", request.degradation_policy, inference_pb2.DegradationPolicy.values())
    _check_draft(request.draft)
    _check_messages(request, settings)
    _check_sampling(request.sampling)
    _check_stopping(request.stopping)


def check_draft_fits(draft: inference_pb2.DraftOptions, reduction: object) -> None:
    """Raises InvalidRequest (DRAFT_INVALID) for a draft beside a reduction: two clusterings cannot be compared."""
    if draft.mode == inference_pb2.DRAFT_MODE_ON and reduction is not None:
        raise _bad_draft(f"it cannot go together with the token reduction {reduction}; ask for reduction none")


def _check_draft(draft: inference_pb2.DraftOptions) -> None:
    if draft.mode not in inference_pb2.DraftMode.values():
        raise _bad_draft(f"mode {draft.mode} is unknown")
    if draft.HasField("threshold") and not 0.0 < draft.threshold <= 1.0:
        raise _bad_draft("threshold is outside its range: above 0, up to 1")


def _check_messages(request: inference_pb2.GenerateRequest, settings: RouterSettings) -> None:
    if not request.messages:
        raise _bad_messages("there are none")
    text_chars = image_count = 0
    for number, message in enumerate(request.messages):
        if message.role not in inference_pb2.Role.values() or not message.role:
            raise _bad_messages(f"message {number} has no known role")
        if not message.parts:
            raise _bad_messages(f"message {number} has no parts")
        for part in message.parts:
            kind = part.WhichOneof("content")
            if kind == "text":
                text_chars += len(part.text)
            elif kind == "image":
                image_count += 1
                if part.image.WhichOneof("source") is None:
                    raise _bad_messages(f"an image of message {number} has neither data nor url")
                _check_enum("detail", part.image.detail, inference_pb2.ImageDetail.values())
            else:
                raise _bad_messages(f"a part of message {number} is neither text nor image")
    if request.messages[-1].role != inference_pb2.ROLE_USER:
        raise _bad_messages("the last one must be of ROLE_USER")
    if request.raw_prompt and (len(request.messages) > 1 or image_count):
        raise _bad_messages("raw_prompt takes a single one without images")
    if image_count > settings.max_images:
        raise InvalidRequest(
            f"the request has {image_count} images, more than max_images={settings.max_images}",
            reason="TOO_MANY_IMAGES",
        )
    if text_chars > settings.max_text_chars:
        raise InvalidRequest(
            f"the request has {text_chars} characters of text, more than max_text_chars={settings.max_text_chars}",
            reason="TEXT_TOO_LONG",
        )


def _check_sampling(sampling: generation_pb2.SamplingParameters) -> None:
    # Written so that NaN fails every comparison.
    if not 0.0 <= sampling.temperature <= 100.0:
        raise _bad_sampling("temperature", "0 to 100")
    if sampling.top_k < 0:
        raise _bad_sampling("top_k", "0 and above")
    if sampling.HasField("top_p") and not 0.0 < sampling.top_p <= 1.0:
        raise _bad_sampling("top_p", "above 0, up to 1")
    if sampling.HasField("repetition_penalty") and not 0.0 < sampling.repetition_penalty <= 10.0:
        raise _bad_sampling("repetition_penalty", "above 0, up to 10")
    if sampling.HasField("top_logprobs") and not 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS:
        raise _bad_sampling("top_logprobs", f"0 to {MAX_TOP_LOGPROBS}")


def _check_stopping(stopping: generation_pb2.StoppingParameters) -> None:
    if stopping.max_tokens < 0:
        raise InvalidRequest("max_tokens must be 0 (the default) or above", reason="STOPPING_INVALID")
    if len(stopping.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"there are {len(stopping.stop)} stop strings, more than {MAX_STOP_STRINGS}", reason="STOPPING_INVALID"
        )
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stopping.stop):
        raise InvalidRequest(f"stop strings must have 1 to {MAX_STOP_CHARS} characters", reason="STOPPING_INVALID")


def _check_enum(name: str, value: int, known: Sequence[int]) -> None:
    if value not in known:
        raise InvalidRequest(f"{name} has the unknown value {value}", reason="ENUM_INVALID")


def _bad_draft(why: str) -> InvalidRequest:
    return InvalidRequest(f"draft: {why}", reason="DRAFT_INVALID")


def _bad_messages(why: str) -> InvalidRequest:
    return InvalidRequest(f"messages: {why}", reason="MESSAGES_INVALID")


def _bad_sampling(name: str, span: str) -> InvalidRequest:
    return InvalidRequest(f"sampling.{name} is outside its range: {span}", reason="SAMPLING_INVALID")
