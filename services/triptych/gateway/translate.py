"""OpenAI's requests to the router's: pure, and the one place that decides what is refused."""

import hashlib
from collections.abc import Mapping, Sequence

from triptych.gateway.errors import unsupported
from triptych.gateway.schemas import ChatCompletionRequest, CompletionRequest, ImageUrl, Options, SamplingRequest
from triptych.v1 import generation_pb2, inference_pb2
from triptych.vision.reduction_spec import parse_reduction, to_message
from triptych.visual_kv import VisualKvPolicy

OPENAI_TEMPERATURE = 1.0
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""

_ROLES = {
    "system": inference_pb2.ROLE_SYSTEM,
    "developer": inference_pb2.ROLE_SYSTEM,
    "user": inference_pb2.ROLE_USER,
    "assistant": inference_pb2.ROLE_ASSISTANT,
}
_DETAILS = {
    None: inference_pb2.IMAGE_DETAIL_HIGH,
    "auto": inference_pb2.IMAGE_DETAIL_HIGH,
    "high": inference_pb2.IMAGE_DETAIL_HIGH,
    "low": inference_pb2.IMAGE_DETAIL_LOW,
}


def chat_requests(
    body: ChatCompletionRequest, pictures: Mapping[str, bytes], tenant: str, request_id: str
) -> list[inference_pb2.GenerateRequest]:
    """Returns one request per choice.

    `pictures` holds the files behind https URLs; other URLs go to the router as they are. Raises ApiError for what is
    not supported.
    """
    _refuse_unsupported_chat(body)
    options = body.triptych or Options()
    base = _base(body, options, tenant)
    base.stopping.max_tokens = body.max_completion_tokens or body.max_tokens or 0
    if body.logprobs:
        base.sampling.top_logprobs = body.top_logprobs or 0
    for message in body.messages:
        turn = base.messages.add(role=_ROLES[message.role])
        for part in message.content or ():
            if part.type == "text":
                turn.parts.add(text=part.text)
            else:
                turn.parts.add(image=_image(part.image_url, options, pictures))
        if not turn.parts:
            turn.parts.add(text="")
    return _choices(base, body, request_id)


def completion_requests(body: CompletionRequest, tenant: str, request_id: str) -> list[inference_pb2.GenerateRequest]:
    """Returns one request per prompt and choice, prompt by prompt. Raises ApiError for what is not supported."""
    if body.echo:
        raise unsupported("echo", "is not supported; leave it out")
    if body.suffix:
        raise unsupported("suffix", "is not supported; leave it out")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "is not supported; it may only equal n")
    requests = []
    for prompt in body.prompt:
        base = _base(body, body.triptych or Options(), tenant)
        base.raw_prompt = True
        base.stopping.max_tokens = body.max_tokens or COMPLETION_MAX_TOKENS
        if body.logprobs is not None:
            base.sampling.top_logprobs = body.logprobs
        base.messages.add(role=inference_pb2.ROLE_USER).parts.add(text=prompt)
        requests += _choices(base, body, request_id)
    for index, request in enumerate(requests):
        request.request_id = _name(request_id, index)
    return requests


def linked_pictures(body: ChatCompletionRequest) -> set[str]:
    """Returns the URLs that somebody must fetch before the request can be sent."""
    urls = (
        part.image_url.url for message in body.messages for part in message.content or () if part.type == "image_url"
    )
    return {url for url in urls if url.lstrip()[:5].lower() != "data:"}


def cache_salt(tenant: str, wanted: str) -> str:
    """Returns what separates tenants in every cache: nothing when there is one tenant who wants nothing."""
    if not tenant:
        return wanted
    return hashlib.sha256(f"{len(tenant)}:{tenant}{wanted}".encode()).hexdigest()


def _base(body: SamplingRequest, options: Options, tenant: str) -> inference_pb2.GenerateRequest:
    """Returns a request without messages."""
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(body, name):
            raise unsupported(name, "is not supported and must be 0; triptych.repetition_penalty is there instead")
    if body.logit_bias:
        raise unsupported("logit_bias", "is not supported; leave it out")
    request = inference_pb2.GenerateRequest(
        sampling=generation_pb2.SamplingParameters(
            temperature=OPENAI_TEMPERATURE if body.temperature is None else body.temperature,
            top_k=options.top_k or 0,
            top_p=body.top_p,
            repetition_penalty=options.repetition_penalty,
        ),
        stopping=generation_pb2.StoppingParameters(stop=body.stop, ignore_eos=bool(options.ignore_eos)),
        cache_salt=cache_salt(tenant, options.cache_salt or ""),
    )
    if options.priority:
        request.priority = generation_pb2.Priority.Value(f"PRIORITY_{options.priority.upper()}")
    if options.visual_kv:
        request.visual_kv = VisualKvPolicy(options.visual_kv).proto
    if options.degrade is False:
        request.degradation_policy = inference_pb2.DEGRADATION_POLICY_FORBID
    if options.reduction:
        request.reduction.CopyFrom(to_message(parse_reduction(options.reduction)))
    if options.draft is not None:
        request.draft.mode = inference_pb2.DRAFT_MODE_ON if options.draft else inference_pb2.DRAFT_MODE_OFF
    if options.draft_threshold is not None:
        request.draft.threshold = options.draft_threshold
    return request


def _choices(
    base: inference_pb2.GenerateRequest, body: SamplingRequest, request_id: str
) -> list[inference_pb2.GenerateRequest]:
    """Returns a copy for every choice, each with a name and a seed of its own."""
    requests = []
    for index in range(body.n or 1):
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(base)
        request.request_id = _name(request_id, index)
        if body.seed is not None:
            request.sampling.seed = derived_seed(body.seed, index)
        requests.append(request)
    return requests


def derived_seed(seed: int, index: int) -> int:
    """Returns the seed of a choice, an unsigned 64-bit number: the first choice's is the request's own."""
    if index == 0:
        return seed % 2**64
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _name(request_id: str, index: int) -> str:
    return f"{request_id}:{index}" if index else request_id


def _image(image: ImageUrl, options: Options, pictures: Mapping[str, bytes]) -> inference_pb2.Image:
    detail = _DETAILS[image.detail]
    if options.resolution:
        detail = inference_pb2.ImageDetail.Value(f"IMAGE_DETAIL_{options.resolution.upper()}")
    data = pictures.get(image.url)
    if data is not None:
        return inference_pb2.Image(data=data, detail=detail)
    return inference_pb2.Image(url=image.url, detail=detail)


def _refuse_unsupported_chat(body: ChatCompletionRequest) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise unsupported("top_logprobs", "needs logprobs to be true")
    if body.response_format is not None and body.response_format.type != "text":
        raise unsupported("response_format", f"{body.response_format.type} is not supported; only text is")
    for name in ("tools", "functions"):
        if getattr(body, name):
            raise unsupported(name, "is not supported: this server calls no tools")
    for name in ("tool_choice", "function_call"):
        if getattr(body, name) not in (None, "none", "auto"):
            raise unsupported(name, "must be none or auto: this server calls no tools")
    if body.modalities is not None and _others(body.modalities):
        raise unsupported("modalities", "other than text are not supported")
    for name in ("audio", "web_search_options"):
        if getattr(body, name) is not None:
            raise unsupported(name, "is not supported; leave it out")


def _others(modalities: Sequence[str]) -> bool:
    return any(modality != "text" for modality in modalities)
