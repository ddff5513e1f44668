"""The two forms in which an answer is told: chat completion and text completion."""

from collections.abc import Sequence
from typing import Any, Protocol

from triptych.v1 import generation_pb2

FINISH_REASONS = {
    generation_pb2.FINISH_REASON_END: "stop",
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}

Choice = dict[str, Any]
Tokens = Sequence[generation_pb2.TokenChoice]


class Shape(Protocol):
    """How a choice looks.

    Attributes:
        id_prefix: What the reply's id begins with.
        whole_object: Name of a whole reply.
        chunk_object: Name of a stream's chunk.
    """

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> Choice | None:
        """Returns the choice of a stream's first chunk, or None where there is none."""

    def piece(self, index: int, text: str, tokens: Tokens) -> Choice:
        """Returns the choice of a chunk with new text."""

    def ending(self, index: int, reason: str) -> Choice:
        """Returns the choice of the last chunk."""

    def whole(self, index: int, text: str, tokens: Tokens, reason: str) -> Choice:
        """Returns a choice of a whole reply."""


class ChatShape:
    """`chat.completion` and its chunks."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, logprobs: bool) -> None:
        self._logprobs = logprobs

    def opening(self, index: int) -> Choice | None:
        """See Shape."""
        return _chat_choice(index, {"role": "assistant", "content": "", "refusal": None}, None, None)

    def piece(self, index: int, text: str, tokens: Tokens) -> Choice:
        """See Shape."""
        return _chat_choice(index, {"content": text}, self._told(tokens), None)

    def ending(self, index: int, reason: str) -> Choice:
        """See Shape."""
        return _chat_choice(index, {}, None, reason)

    def whole(self, index: int, text: str, tokens: Tokens, reason: str) -> Choice:
        """See Shape."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._told(tokens), "finish_reason": reason}

    def _told(self, tokens: Tokens) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [{**_entry(token.chosen), "top_logprobs": [_entry(top) for top in token.top]} for token in tokens]
        return {"content": content, "refusal": None}


class TextShape:
    """`text_completion`, whole or in pieces."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, logprobs: bool) -> None:
        self._logprobs = logprobs
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> Choice | None:
        """See Shape."""
        return None

    def piece(self, index: int, text: str, tokens: Tokens) -> Choice:
        """See Shape."""
        return {"index": index, "text": text, "logprobs": self._told(index, tokens), "finish_reason": None}

    def ending(self, index: int, reason: str) -> Choice:
        """See Shape."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def whole(self, index: int, text: str, tokens: Tokens, reason: str) -> Choice:
        """See Shape."""
        return {"index": index, "text": text, "logprobs": self._told(index, tokens), "finish_reason": reason}

    def _told(self, index: int, tokens: Tokens) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token.chosen.text)
        return {
            "tokens": [token.chosen.text for token in tokens],
            "token_logprobs": [token.chosen.logprob for token in tokens],
            "top_logprobs": [{top.text: top.logprob for top in token.top} for token in tokens],
            "text_offset": offsets,
        }


def _chat_choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None) -> Choice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _entry(token: generation_pb2.TokenLogprob) -> dict[str, Any]:
    whole = "\N{REPLACEMENT CHARACTER}" not in token.text
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()) if whole else None}
