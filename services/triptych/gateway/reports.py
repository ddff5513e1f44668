"""What a reply tells beside the text: token counts as OpenAI has them, and the `triptych` object."""

from collections.abc import Iterable
from typing import Any

from triptych.v1 import generation_pb2, inference_pb2
from triptych.vision.draft_report import draft_json
from triptych.vision.reduction_spec import reduction_text
from triptych.visual_kv import policy_name


def usage_of(usages: Iterable[generation_pb2.Usage], choices_per_prompt: int) -> dict[str, Any]:
    """Returns OpenAI's token counts of a request's choices; the prompt of several choices counts once."""
    prompt = cached = output = 0
    for index, usage in enumerate(usages):
        output += usage.output_tokens
        if index % choices_per_prompt == 0:
            prompt += usage.text_tokens + usage.visual_tokens
            cached += usage.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def started_report(started: inference_pb2.Started) -> dict[str, Any]:
    """Returns what is known when a generation starts."""
    return {
        "request_id": started.request_id,
        "trace_id": started.trace_id or None,
        "images": [
            {
                "width": image.width,
                "height": image.height,
                "encoded_side": image.encoded_side,
                "visual_tokens": image.visual_tokens,
                "detail": _lower(inference_pb2.ImageDetail.Name(image.detail), "IMAGE_DETAIL_", "high"),
                "resolution_reason": _lower(
                    inference_pb2.ResolutionReason.Name(image.resolution_reason), "RESOLUTION_REASON_", "requested"
                ),
                "encoder_tokens": image.encoder_tokens,
                "reduction": reduction_text(image),
                "source": _lower(inference_pb2.FeatureSource.Name(image.source), "FEATURE_SOURCE_", "dropped"),
            }
            for image in started.images
        ],
    }


def finished_report(finished: inference_pb2.Finished) -> dict[str, Any]:
    """Returns what is known when it has ended: seconds per stage, tokens by kind, degradations, visual KV."""
    usage = finished.usage
    return {
        "timings": timings_of(finished.durations),
        "usage": {
            "text_tokens": usage.text_tokens,
            "visual_tokens": usage.visual_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        },
        "draft": draft_json(finished),
        "degradations": [
            {
                "kind": _lower(inference_pb2.DegradationKind.Name(item.kind), "DEGRADATION_KIND_", "unknown"),
                "explanation": item.explanation,
            }
            for item in finished.degradations
        ],
        "visual_kv": {
            "policy": policy_name(finished.visual_kv.policy),
            "lossy": finished.visual_kv.lossy,
            "saved_bytes": finished.visual_kv.saved_bytes,
        },
    }


def timings_of(durations: generation_pb2.StageDurations) -> dict[str, float]:
    """Returns seconds per stage, for the stages that happened."""
    return {field.name: value.ToNanoseconds() / 1e9 for field, value in durations.ListFields()}


def _lower(name: str, prefix: str, unspecified: str) -> str:
    short = name.removeprefix(prefix).lower()
    return unspecified if short == "unspecified" else short
