"""What became of a draft encoder's features, as plain values."""

from triptych.v1 import inference_pb2


def outcome_name(report: inference_pb2.DraftReport) -> str:
    """Returns `kept`, `rejected`, `unneeded`, `unavailable` or `unverified`."""
    return inference_pb2.DraftOutcome.Name(report.outcome).removeprefix("DRAFT_OUTCOME_").lower()


def draft_json(finished: inference_pb2.Finished) -> dict[str, str | float | None] | None:
    """Returns a finished generation's report; None when there was no draft."""
    if not finished.HasField("draft"):
        return None
    draft = finished.draft
    return {
        "outcome": outcome_name(draft),
        "similarity": draft.similarity if draft.HasField("similarity") else None,
        "lowest_similarity": draft.lowest_similarity if draft.HasField("lowest_similarity") else None,
        "drafted_tokens": draft.drafted_tokens,
    }
