"""`triptych ask`: one question about pictures to a running stack."""

import json
import sys
from pathlib import Path

from rich.console import Console

from triptych import client
from triptych.errors import InvalidRequest, Unavailable
from triptych.v1 import inference_pb2 as inference
from triptych.vision.draft_report import draft_json, outcome_name
from triptych.vision.reduction_spec import reduction_text
from triptych.visual_kv import policy_name


def run(
    address: str, images: list[Path], question: str, detail: client.Detail, options: client.Options, as_json: bool
) -> None:
    """Prints the answer as it arrives, then what it cost (stderr), or one JSON object.

    Raises InvalidRequest when an argument is no readable image, Unavailable when nobody answers at `address`.
    """
    if not images and Path(question).is_file():
        raise InvalidRequest(
            f'{question} is a file; the question comes last: triptych ask {question} "what is in the picture?"'
        )
    pieces: list[str] = []
    started, finished = inference.Started(), inference.Finished()
    message = client.user(*images, question, detail=detail)
    try:
        with client.Client(address) as service:
            for event in service.stream([message], options):
                kind = event.WhichOneof("event")
                if kind == "started":
                    started = event.started
                elif kind == "chunk":
                    pieces.append(event.chunk.text)
                    if not as_json:
                        print(event.chunk.text, end="", flush=True)
                elif kind == "finished":
                    finished = event.finished
    except Unavailable as error:
        if error.reason != Unavailable.default_reason:  # The router answered: it knows better what is missing.
            raise
        raise Unavailable(
            f"no router answers at {address}: start one with `triptych up`, or name it with --address"
        ) from None
    answer = client.Answer("".join(pieces), started, finished)
    if as_json:
        print(json.dumps(answer_json(answer)))
        return
    print()
    summary = ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in answer.stages.items())
    usage = answer.usage
    tokens = (
        f"{usage.visual_tokens} visual + {usage.text_tokens} text tokens ({usage.cached_tokens} cached) -> "
        f"{usage.output_tokens}"
    )
    console = Console(file=sys.stderr)
    console.print(f"{tokens}; {summary}", style="dim", highlight=False, soft_wrap=True)
    if finished.HasField("draft"):
        console.print(draft_summary(finished.draft), style="dim", highlight=False, soft_wrap=True)
    visual_kv = finished.visual_kv
    if visual_kv.saved_bytes:
        loss = "lossy" if visual_kv.lossy else "exact"
        line = f"visual KV: {policy_name(visual_kv.policy)} ({loss}), {visual_kv.saved_bytes / 1e6:.2f} MB saved"
        console.print(line, style="yellow" if visual_kv.lossy else "dim", highlight=False, soft_wrap=True)
    for degradation in finished.degradations:
        console.print(f"degraded: {degradation.explanation}", style="yellow", highlight=False, soft_wrap=True)


def draft_summary(draft: inference.DraftReport) -> str:
    """Returns what became of a draft, for people."""
    outcome = outcome_name(draft)
    if not draft.HasField("similarity"):
        return f"draft {outcome}"
    return f"draft {outcome}: similarity {draft.similarity:.3f}, least similar token {draft.lowest_similarity:.3f}"


def answer_json(answer: client.Answer) -> dict[str, object]:
    """Returns an answer as plain values: text, finish reason, token counts, seconds per stage, images, degradations."""
    usage = answer.usage
    return {
        "request_id": answer.started.request_id,
        "model": answer.started.model,
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": {
            "text_tokens": usage.text_tokens,
            "visual_tokens": usage.visual_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        },
        "stages": answer.stages,
        "images": [
            {
                "identity": image.identity,
                "width": image.width,
                "height": image.height,
                "encoded_side": image.encoded_side,
                "visual_tokens": image.visual_tokens,
                "encoder_tokens": image.encoder_tokens,
                "reduction": reduction_text(image),
                "source": inference.FeatureSource.Name(image.source).removeprefix("FEATURE_SOURCE_").lower(),
            }
            for image in answer.started.images
        ],
        "visual_kv": {
            "policy": policy_name(answer.finished.visual_kv.policy),
            "lossy": answer.finished.visual_kv.lossy,
            "saved_bytes": answer.finished.visual_kv.saved_bytes,
        },
        "degradations": [degradation.explanation for degradation in answer.finished.degradations],
        "draft": draft_json(answer.finished),
        "trace_id": answer.started.trace_id,
    }
