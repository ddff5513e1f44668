"""One request's answer: its generations as a whole reply, or as server-sent events."""

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from triptych.errors import TriptychError
from triptych.gateway import errors, sse
from triptych.gateway.merging import merged
from triptych.gateway.metrics import Recorder
from triptych.gateway.reports import finished_report, started_report, usage_of
from triptych.gateway.shapes import FINISH_REASONS, Choice, Shape
from triptych.v1 import generation_pb2, inference_pb2

log = logging.getLogger(__name__)

Events = AsyncGenerator[inference_pb2.GenerateResponse, None]


@dataclass(slots=True)
class _Told:
    """What one generation has told so far."""

    texts: list[str] = field(default_factory=list)
    tokens: list[generation_pb2.TokenChoice] = field(default_factory=list)
    started: inference_pb2.Started = field(default_factory=inference_pb2.Started)
    finished: inference_pb2.Finished = field(default_factory=inference_pb2.Finished)

    @property
    def reason(self) -> str:
        return FINISH_REASONS.get(self.finished.finish_reason, "stop")

    def report(self) -> dict[str, Any]:
        return {**started_report(self.started), **finished_report(self.finished)}


class Answering:
    """Turns the router's events into a reply. Use either `whole` or `pieces`, once."""

    def __init__(
        self,
        streams: Sequence[Events],
        shape: Shape,
        recorder: Recorder,
        *,
        request_id: str,
        model: str,
        choices_per_prompt: int = 1,
    ) -> None:
        self._streams = streams
        self._shape = shape
        self._recorder = recorder
        self._choices_per_prompt = choices_per_prompt
        self._told = [_Told() for _ in streams]
        self._head = {"id": f"{shape.id_prefix}{request_id}", "created": int(time.time()), "model": model}

    async def whole(self) -> dict[str, Any]:
        """Returns the complete reply. Raises TriptychError."""
        async with aclosing(merged(self._streams)) as events:
            async for index, event in events:
                self._recorder.note(event)
                told = self._told[index]
                match event.WhichOneof("event"):
                    case "started":
                        told.started = event.started
                    case "chunk":
                        told.texts.append(event.chunk.text)
                        told.tokens += event.chunk.tokens
                    case "finished":
                        told.finished = event.finished
        choices = [
            self._shape.whole(index, "".join(told.texts), told.tokens, told.reason)
            for index, told in enumerate(self._told)
        ]
        return {
            **self._head,
            "object": self._shape.whole_object,
            "choices": choices,
            "usage": self._usage(),
            "triptych": self._told[0].report(),
        }

    async def pieces(self, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events. Raises TriptychError before the first; later, an error is the last event."""
        begun = False
        try:
            async with aclosing(self._chunks(include_usage)) as chunks:
                async for chunk in chunks:
                    yield sse.event(chunk)
                    begun = True
            yield sse.DONE
        except Exception as error:
            if not begun:
                raise
            yield self._last_words(error).event()

    async def _chunks(self, include_usage: bool) -> AsyncGenerator[dict[str, Any], None]:
        shape = self._shape
        async with aclosing(merged(self._streams)) as events:
            async for index, event in events:
                self._recorder.note(event)
                told = self._told[index]
                match event.WhichOneof("event"):
                    case "chunk":
                        piece = shape.piece(index, event.chunk.text, event.chunk.tokens)
                        yield self._chunk(include_usage, piece)
                    case "started":
                        told.started = event.started
                        opening = shape.opening(index)
                        if opening is not None:
                            yield self._chunk(include_usage, opening, started_report(event.started))
                    case "finished":
                        told.finished = event.finished
                        yield self._chunk(include_usage, shape.ending(index, told.reason), told.report())
        if include_usage:
            yield {**self._head, "object": shape.chunk_object, "choices": [], "usage": self._usage()}

    def _chunk(self, with_usage: bool, choice: Choice, report: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = {**self._head, "object": self._shape.chunk_object, "choices": [choice]}
        if with_usage:
            chunk["usage"] = None
        if report is not None:
            chunk["triptych"] = report
        return chunk

    def _usage(self) -> dict[str, Any]:
        return usage_of((told.finished.usage for told in self._told), self._choices_per_prompt)

    def _last_words(self, error: Exception) -> errors.ApiError:
        if isinstance(error, TriptychError):
            last = errors.from_triptych(error)
        else:
            log.error("a stream failed", exc_info=error)
            last = errors.internal(error)
        self._recorder.stream_failed(last.body.error.code or "internal")
        return last
