"""Proto messages to what the engine understands, checked: whatever passes here can hurt nobody but its sender."""

import time
from dataclasses import replace

import torch
from torch import Tensor

from triptych import tensors
from triptych.config import WorkerSettings
from triptych.errors import InvalidRequest
from triptych.v1 import generation_pb2, inference_pb2, tensor_pb2, worker_pb2
from triptych.visual_kv import VisualKvPolicy
from triptych.worker.engine.request import (
    GenerationRequest,
    PriorityClass,
    SamplingOptions,
    StoppingOptions,
    TokenizedPrompt,
)
from triptych.worker.loading import LoadedModel
from triptych.worker.prompt import ImageSlot, Turn

_ROLES = {
    inference_pb2.ROLE_SYSTEM: "system",
    inference_pb2.ROLE_USER: "user",
    inference_pb2.ROLE_ASSISTANT: "assistant",
}
_PRIORITIES = {
    generation_pb2.PRIORITY_UNSPECIFIED: PriorityClass.STANDARD,
    generation_pb2.PRIORITY_INTERACTIVE: PriorityClass.INTERACTIVE,
    generation_pb2.PRIORITY_STANDARD: PriorityClass.STANDARD,
    generation_pb2.PRIORITY_ECONOMY: PriorityClass.ECONOMY,
}
_FEATURE_TYPES = (tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_FLOAT16, tensor_pb2.DATA_TYPE_BFLOAT16)
_MAX_REQUEST_ID = 128
_MAX_STOPS = 16
_MAX_STOP_CHARS = 256
_MAX_TOP_LOGPROBS = 20


def read_request(
    message: worker_pb2.WorkerGenerateRequest, model: LoadedModel, settings: WorkerSettings, arrival_ns: int
) -> GenerationRequest:
    """Validates and tokenizes a request. Takes time in proportion to its size: not for the event loop.

    Raises InvalidRequest; reasons are those of `PromptEncoder.encode`, TENSOR_MALFORMED for features, PROMPT_TOO_LONG,
    and INVALID_REQUEST for the rest.
    """
    if not 1 <= len(message.request_id) <= _MAX_REQUEST_ID:
        raise InvalidRequest(f"request_id must have 1 to {_MAX_REQUEST_ID} characters")
    if message.priority not in _PRIORITIES:
        raise InvalidRequest(f"priority {message.priority} is unknown")
    sampling = _read_sampling(message.sampling)
    stopping = _read_stopping(message.stopping, settings.default_max_tokens)
    return GenerationRequest(
        request_id=message.request_id,
        prompt=read_prompt(message.prompt, model),
        features=tuple(_read_features(image, model) for image in message.prompt.images),
        sampling=sampling,
        stopping=stopping,
        priority=_PRIORITIES[message.priority],
        cache_salt=message.prompt.cache_salt,
        visual_kv=read_policy(message.visual_kv, settings),
        arrival_ns=arrival_ns,
    )


def read_final(
    request: GenerationRequest, message: worker_pb2.SettleDraftRequest, model: LoadedModel
) -> GenerationRequest:
    """Returns a request that was submitted with draft features, with its images' final ones in their places.

    Its time at the worker begins anew. Raises InvalidRequest when they do not fit the prompt.
    """
    spans = request.prompt.spans
    if len(message.images) != len(spans):
        raise InvalidRequest(f"the prompt has {len(spans)} images, the verdict {len(message.images)}")
    final_spans, final_features = list(spans), list(request.features)
    for index, (image, span) in enumerate(zip(message.images, spans, strict=True)):
        if not image.identity:
            continue
        if len(image.identity) != 32 or image.token_count != span.count or not image.HasField("features"):
            raise InvalidRequest("a final image needs an identity of 32 bytes, features, and the draft's token_count")
        final_spans[index] = replace(span, identity=image.identity)
        final_features[index] = _read_features(image, model)
    return replace(
        request,
        prompt=replace(request.prompt, spans=tuple(final_spans)),
        features=tuple(final_features),
        arrival_ns=time.time_ns(),
    )


def read_policy(value: int, settings: WorkerSettings) -> VisualKvPolicy:
    """Returns a visual KV policy, the settings' own where none is named. Raises InvalidRequest when it is unknown."""
    known = {int(policy.proto): policy for policy in VisualKvPolicy} | {0: settings.visual_kv}
    if value not in known:
        raise InvalidRequest(f"visual_kv {value} is unknown")
    return known[value]


def read_prompt(message: worker_pb2.Prompt, model: LoadedModel) -> TokenizedPrompt:
    """Validates and tokenizes a prompt. Raises InvalidRequest as `read_request` does."""
    slots = [ImageSlot(image.identity, image.token_count) for image in message.images]
    for slot in slots:
        if len(slot.identity) != 32 or slot.token_count <= 0:
            raise InvalidRequest("an image needs an identity of 32 bytes and a token_count above 0")
    visual_tokens = sum(slot.token_count for slot in slots)
    if visual_tokens > model.engine.context_tokens:
        raise InvalidRequest(
            f"{visual_tokens} visual tokens exceed the context of {model.engine.context_tokens} tokens; send fewer or "
            "smaller images",
            reason="PROMPT_TOO_LONG",
        )
    if not message.messages:
        raise InvalidRequest("a prompt needs at least one message")
    placed = 0
    turns: list[Turn] = []
    for turn in message.messages:
        if turn.role not in _ROLES:
            raise InvalidRequest("every message needs a role: system, user or assistant")
        parts: list[str | ImageSlot] = []
        for part in turn.parts:
            kind = part.WhichOneof("content")
            if kind == "text":
                parts.append(part.text)
            elif kind == "image_index" and part.image_index == placed < len(slots):
                parts.append(slots[placed])
                placed += 1
            else:
                raise InvalidRequest("a part holds text, or the index of the next image of the prompt")
        turns.append(Turn(_ROLES[turn.role], tuple(parts)))
    if placed != len(slots):
        raise InvalidRequest(f"the prompt has {len(slots)} images, its messages mention {placed}")
    if message.raw:
        return model.prompts.encode_raw(_only_text(turns))
    return model.prompts.encode(turns)


def _only_text(turns: list[Turn]) -> str:
    if len(turns) > 1 or not all(isinstance(part, str) for part in turns[0].parts):
        raise InvalidRequest("a raw prompt is a single message without images")
    return "".join(part for part in turns[0].parts if isinstance(part, str))


def _read_sampling(message: generation_pb2.SamplingParameters) -> SamplingOptions:
    top_p = message.top_p if message.HasField("top_p") else 1.0
    penalty = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    if not 0.0 <= message.temperature <= 100.0:
        raise InvalidRequest("temperature must be within 0 to 100")
    if message.top_k < 0:
        raise InvalidRequest("top_k must be 0 or more")
    if not 0.0 < top_p <= 1.0:
        raise InvalidRequest("top_p must be above 0 and at most 1")
    if not 0.0 < penalty <= 10.0:
        raise InvalidRequest("repetition_penalty must be above 0 and at most 10")
    seed = message.seed if message.HasField("seed") else None
    top_logprobs = message.top_logprobs if message.HasField("top_logprobs") else None
    if top_logprobs is not None and not 0 <= top_logprobs <= _MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be within 0 to {_MAX_TOP_LOGPROBS}")
    return SamplingOptions(message.temperature, message.top_k, top_p, penalty, seed, top_logprobs)


def _read_stopping(message: generation_pb2.StoppingParameters, default_max_tokens: int) -> StoppingOptions:
    if message.max_tokens < 0:
        raise InvalidRequest("max_tokens must be 0 or more")
    if len(message.stop) > _MAX_STOPS or not all(1 <= len(stop) <= _MAX_STOP_CHARS for stop in message.stop):
        raise InvalidRequest(f"stop takes at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARS} characters")
    return StoppingOptions(message.max_tokens or default_max_tokens, tuple(message.stop), message.ignore_eos)


def _read_features(image: worker_pb2.PromptImage, model: LoadedModel) -> Tensor | None:
    """Returns an image's features [token_count, hidden] as the model takes them, or None when it came without."""
    if not image.HasField("features"):
        return None
    if image.features.data_type not in _FEATURE_TYPES:
        raise _malformed("must be float32, float16 or bfloat16")
    array = tensors.from_proto(image.features)
    expected = (image.token_count, model.config.decoder.hidden_size)
    if array.shape != expected:
        raise _malformed(f"must be {list(expected)} (token_count, hidden_size), not {list(array.shape)}")
    features = torch.from_numpy(array.copy())
    if image.features.data_type == tensor_pb2.DATA_TYPE_BFLOAT16:
        features = features.view(torch.bfloat16)
    features = features.to(model.device, model.dtype)
    if not features.isfinite().all():
        raise _malformed(f"must be finite as {str(model.dtype).removeprefix('torch.')}")
    return features


def _malformed(rule: str) -> InvalidRequest:
    return InvalidRequest(f"an image's features {rule}", reason="TENSOR_MALFORMED")
