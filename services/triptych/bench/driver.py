"""Runs one round: sends what arrives, when it is due, and records what comes back."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from triptych.bench.pacing import Concurrency, Pacing, poisson_times
from triptych.bench.recorder import Record, Recorder
from triptych.bench.targets.target import Piece, RequestFailed, Target
from triptych.bench.workload import Arrival, Ask, Conversation, Message, count_conversations

CUT_OFF = "unfinished at the round's deadline"
LAG_INTERVAL_S = 0.01


@dataclass(slots=True)
class Round:
    """What one round gave.

    Attributes:
        records: One per request, in order of sending.
        duration_s: From the first request's sending to the last one's end.
        loop_lags_s: How late this client's event loop ran a timer, every LAG_INTERVAL_S.
        cpu_s: Processor time that this client's process used.
    """

    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0
    loop_lags_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


async def run_round(
    target: Target,
    arrivals: Sequence[Arrival],
    pacing: Pacing,
    output_tokens: int,
    seed: int = 0,
    deadline_s: float | None = None,
) -> Round:
    """Sends all arrivals and returns once everything is answered, has failed, or `deadline_s` has passed.

    `seed` fixes the arrival times of an open loop. What the deadline cuts off, sent or not, is recorded as failed.
    """
    runner = _Runner(target, output_tokens)
    lag = asyncio.create_task(_watch_loop(runner.round.loop_lags_s))
    cpu_before_s = time.process_time()
    try:
        async with asyncio.timeout(deadline_s):
            if isinstance(pacing, Concurrency):
                await runner.closed_loop(arrivals, pacing.clients)
            else:
                per_s = pacing.per_s * len(arrivals) / count_conversations(arrivals)
                await runner.open_loop(arrivals, poisson_times(per_s, len(arrivals), seed))
    except TimeoutError:
        runner.note_unsent(arrivals)
    finally:
        lag.cancel()
    outcome = runner.round
    outcome.cpu_s = time.process_time() - cpu_before_s
    if outcome.records:
        first_s = min(record.sent_s for record in outcome.records)
        outcome.duration_s = max(record.ended_s for record in outcome.records) - first_s
    return outcome


class _Runner:
    """One round in progress."""

    def __init__(self, target: Target, output_tokens: int) -> None:
        self.round = Round()
        self._target = target
        self._output_tokens = output_tokens
        self._origin_s = time.perf_counter()
        self._begun = 0

    def clock(self) -> float:
        """Seconds since the round began."""
        return time.perf_counter() - self._origin_s

    async def closed_loop(self, arrivals: Sequence[Arrival], clients: int) -> None:
        shared = iter(arrivals)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(clients, len(arrivals))):
                group.create_task(self._send_all(shared))

    async def open_loop(self, arrivals: Sequence[Arrival], times_s: Sequence[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for arrival, due_s in zip(arrivals, times_s, strict=True):
                await asyncio.sleep(due_s - self.clock())
                for conversation in arrival:
                    self._begun += 1
                    group.create_task(self._converse(conversation, due_s))

    def note_unsent(self, arrivals: Sequence[Arrival]) -> None:
        """Records the conversations that had not begun as cut off."""
        now_s = self.clock()
        unsent = [conversation for arrival in arrivals for conversation in arrival][self._begun :]
        for conversation in unsent:
            self.round.records.append(Record(conversation.label, 0, now_s, now_s, ended_s=now_s, error=CUT_OFF))

    async def _send_all(self, arrivals: Iterator[Arrival]) -> None:
        for arrival in arrivals:
            due_s = self.clock()
            self._begun += len(arrival)
            if len(arrival) == 1:
                await self._converse(arrival[0], due_s)
                continue
            async with asyncio.TaskGroup() as group:
                for conversation in arrival:
                    group.create_task(self._converse(conversation, due_s))

    async def _converse(self, conversation: Conversation, due_s: float) -> None:
        """Sends one turn after the other; a failed turn ends the conversation."""
        dialogue: list[Message] = []
        for number, turn in enumerate(conversation.turns):
            dialogue.append(Message("user", turn.text, turn.pictures))
            record = Record(conversation.label, number, due_s, self.clock())
            self.round.records.append(record)
            answer = await self._ask(Ask(tuple(dialogue), self._output_tokens), Recorder(record, self.clock))
            if record.error:
                return
            dialogue.append(Message("assistant", answer))
            due_s = self.clock()

    async def _ask(self, ask: Ask, recorder: Recorder) -> str:
        answer: list[str] = []
        try:
            async with aclosing(self._target.stream(ask)) as items:
                async for item in items:
                    if isinstance(item, Piece):
                        recorder.piece(item.tokens)
                        answer.append(item.text)
                    else:
                        recorder.usage(item.prompt_tokens, item.output_tokens)
        except RequestFailed as failure:
            recorder.end(failure.kind)
        except asyncio.CancelledError:
            recorder.end(CUT_OFF)
            raise
        else:
            recorder.end()
        return "".join(answer)


async def _watch_loop(lags_s: list[float]) -> None:
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(LAG_INTERVAL_S)
        lags_s.append(max(0.0, time.perf_counter() - before_s - LAG_INTERVAL_S))
