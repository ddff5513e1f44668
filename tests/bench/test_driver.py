"""Rounds: who is sent when, and what is recorded."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from triptych.bench.driver import CUT_OFF, run_round
from triptych.bench.pacing import Concurrency, Rate
from triptych.bench.scenarios import Shape, make_arrivals
from triptych.bench.targets.target import Piece, RequestFailed, Usage
from triptych.bench.workload import Arrival, Ask, Conversation, Turn

SHAPE = Shape(prompt_tokens=3, output_tokens=2, picture_side=16)


class Simulated:
    """A server that answers after `time_s`, and fails what says `fail`."""

    def __init__(self, time_s: float = 0.01, name: str = "simulated") -> None:
        self.name = name
        self.model = "none"
        self.asks: list[Ask] = []
        self.running = 0
        self.most_running = 0
        self._time_s = time_s

    async def prepare(self) -> None:
        pass

    async def stream(self, ask: Ask) -> AsyncGenerator[Piece | Usage, None]:
        self.asks.append(ask)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self._time_s)
            if ask.messages[-1].text == "fail":
                raise RequestFailed("told so")
            yield Piece("one ")
            yield Piece("two")
            yield Usage(5, ask.max_tokens)
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass


def texts(count: int) -> list[Arrival]:
    return make_arrivals("text", SHAPE, count, 0)


async def test_a_closed_loop_keeps_exactly_so_many_requests_running() -> None:
    server = Simulated()
    outcome = await run_round(server, texts(20), Concurrency(4), 2)
    assert server.most_running == 4
    assert len(outcome.records) == 20
    assert outcome.duration_s == pytest.approx(5 * 0.01, rel=3)
    assert all(record.counted and record.output_tokens == 2 for record in outcome.records)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    server = Simulated(time_s=0.3)
    outcome = await run_round(server, texts(20), Rate(200.0), 2)
    assert server.most_running > 10
    assert len(outcome.records) == 20
    assert max(record.lag_s for record in outcome.records) < 0.1


async def test_a_burst_is_sent_at_once() -> None:
    server = Simulated(time_s=0.05)
    burst = tuple(Conversation("image", (Turn("x"),)) for _ in range(4))
    await run_round(server, [burst], Concurrency(1), 2)
    assert server.most_running == 4


async def test_later_turns_carry_the_answers_so_far() -> None:
    server = Simulated()
    outcome = await run_round(server, make_arrivals("multi-turn", SHAPE, 1, 0), Concurrency(1), 2)
    assert [len(ask.messages) for ask in server.asks] == [1, 3, 5]
    last = server.asks[-1].messages
    assert [message.role for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1].text == "one two" and last[0].pictures and not last[2].pictures
    assert [record.turn for record in outcome.records] == [0, 1, 2]


async def test_a_failed_turn_ends_its_conversation_and_nothing_else() -> None:
    server = Simulated()
    failing = Conversation("text", (Turn("fail"), Turn("never sent")))
    outcome = await run_round(server, [(failing,), *texts(2)], Concurrency(1), 2)
    assert [record.error for record in outcome.records] == ["told so", "", ""]


@pytest.mark.parametrize("pacing", [Concurrency(2), Rate(50.0)], ids=str)
async def test_what_the_deadline_cuts_off_is_a_failure_sent_or_not(pacing: Concurrency | Rate) -> None:
    server = Simulated(time_s=0.15)
    outcome = await run_round(server, texts(40), pacing, 2, deadline_s=0.25)
    errors = [record.error for record in outcome.records]
    assert len(errors) == 40
    assert set(errors) == {"", CUT_OFF}
    assert server.running == 0
