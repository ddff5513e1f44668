"""What need not wait for a step's tokens is done while the step computes."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.checkpoints import write_checkpoint
from tests.worker.driving import Answer, ask, load, run
from tests.worker.serving import Client, request, settings_for, text_of
from triptych.worker.engine.engine import Engine
from triptych.worker.engine.events import Completed, Event, Failed, Text
from triptych.worker.engine.request import SamplingOptions
from triptych.worker.engine.scheduler import StepPlan
from triptych.worker.engine.sequence import Sequence
from triptych.worker.loading import LoadedModel
from triptych.worker.server import run_worker


def texts(told: list[tuple[Sequence, Event]]) -> list[str]:
    return [event.text for _, event in told if isinstance(event, Text)]


def test_a_steps_text_is_told_while_the_next_step_computes(tiny: LoadedModel) -> None:
    engine = tiny.engine
    engine.submit(ask(tiny, "hello", max_tokens=3, ignore_eos=True))
    engine.start()
    assert engine.tell() == []
    engine.finish()
    engine.start()
    first = engine.tell()
    assert engine._computing is not None  # The second token is not known, the first one's text is.
    engine.finish()
    assert texts(first) + texts(engine.tell() + engine.step()) == texts_of_a_quiet_engine(tiny)


def texts_of_a_quiet_engine(model: LoadedModel) -> list[str]:
    (answer,) = run(model.engine, [ask(model, "hello", max_tokens=3, ignore_eos=True)])
    return answer.texts


async def test_a_client_has_a_token_while_the_next_one_is_computed(tiny_dir: Path) -> None:
    async with run_worker(settings_for(tiny_dir)) as worker:
        client = Client(worker)
        whole = text_of(await client.answer(request()))
        go_on, free, steps = threading.Semaphore(1), False, []
        start = worker.model.engine.runner.start

        def held(plan: StepPlan) -> Callable[[], Any]:
            steps.append(plan)
            finish = start(plan)
            return lambda: (go_on.acquire(timeout=20), finish())[1]

        worker.model.engine.runner.start = held  # type: ignore[method-assign]
        text = ""
        async for event in client.stub.Generate(request()):
            text += event.chunk.text
            if text and not free:  # The first step may end; the second waits until the text of the first was read here.
                assert whole.startswith(text) and len(steps) == 2
                free = True
                go_on.release(1000)
        assert text == whole
        await client.settle()
        await client.channel.close()


def test_a_cancel_during_a_step_frees_everything_before_the_next_one(tiny: LoadedModel) -> None:
    engine = tiny.engine
    gone, stays = (engine.submit(ask(tiny, text, max_tokens=6, ignore_eos=True))[0] for text in ("go", "stay"))
    engine.step()
    engine.start()
    blocks = list(gone.blocks)
    engine.cancel(gone)
    engine.cancel(gone)
    assert gone.blocks == blocks  # The step still writes there.
    engine.check_integrity()
    engine.finish()
    assert gone.blocks == [] and engine.load().running == 1
    engine.check_integrity()
    told = [engine.tell()]
    while engine.has_work:
        told.append(engine.step())
    assert {sequence for events in told for sequence, _ in events} == {stays}


def test_a_cancel_after_the_last_token_takes_its_news_along(tiny: LoadedModel) -> None:
    sequence, _ = tiny.engine.submit(ask(tiny, "hello", max_tokens=1, ignore_eos=True))
    tiny.engine.start()
    tiny.engine.finish()
    tiny.engine.cancel(sequence)
    assert not tiny.engine.has_work
    tiny.engine.check_integrity()


def test_text_that_cannot_be_made_fails_its_request_alone_though_its_next_step_computes(tiny: LoadedModel) -> None:
    engine = tiny.engine
    broken, sound = (engine.submit(ask(tiny, text, max_tokens=4, ignore_eos=True))[0] for text in ("go", "stay"))
    engine.start()
    engine.finish()
    broken.text = None  # type: ignore[assignment]
    engine.start()
    assert [type(event) for sequence, event in engine.tell() if sequence is broken] == [Failed]
    engine.finish()
    assert broken.blocks == []
    ends = [event for _ in range(4) for sequence, event in engine.step() if isinstance(event, Completed)]
    assert len(ends) == 1 and sound.output_tokens == 4
    engine.check_integrity()


def test_a_step_that_fails_at_its_end_fails_all_but_those_who_left(tiny: LoadedModel) -> None:
    engine = tiny.engine
    gone, unlucky = (engine.submit(ask(tiny, text, max_tokens=4, ignore_eos=True))[0] for text in ("go", "stay"))
    start = engine.runner.start

    def explode() -> Any:
        raise RuntimeError("lost")

    engine.runner.start = lambda plan: (start(plan), explode)[1]  # type: ignore[method-assign]
    engine.start()
    engine.cancel(gone)
    engine.finish()
    ((sequence, event),) = engine.tell()
    assert sequence is unlucky and isinstance(event, Failed)
    engine.check_integrity()
    assert engine.load().used_blocks == 0


def drain_overlapped(engine: Engine, answers: dict[Sequence, Answer], cancel_at: dict[int, Sequence]) -> None:
    step = 0
    while engine.has_work:
        engine.start()
        for sequence, event in engine.tell():
            if isinstance(event, Text):
                answers[sequence].texts.append(event.text)
            elif isinstance(event, Completed):
                answers[sequence].reason = event.reason
        if step in cancel_at:
            engine.cancel(cancel_at[step])
        engine.check_integrity()
        engine.finish()
        engine.check_integrity()
        step += 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "pair")
    return load(folder), load(folder, kv_blocks=20, max_running=3, speculative_tokens=3)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.booleans()), min_size=1, max_size=6),
    st.dictionaries(st.integers(0, 30), st.integers(0, 5), max_size=3),
)
def test_overlapped_steps_give_the_answers_of_steps_one_after_another(
    pair: tuple[LoadedModel, LoadedModel], wishes: list[tuple[int, int, bool]], cancels: dict[int, int]
) -> None:
    plain, busy = pair
    requests = [
        ask(
            plain,
            "x" * length,
            max_tokens=most,
            stop=("a",) if stops else (),
            ignore_eos=not stops,
            sampling=SamplingOptions(temperature=0.9 if stops else 0.0, seed=length),
        )
        for length, most, stops in wishes
    ]
    expected = run(plain.engine, requests)
    sequences = [busy.engine.submit(each)[0] for each in requests]
    answers = {sequence: Answer() for sequence in sequences}
    cancelled = {step: sequences[index] for step, index in cancels.items() if index < len(sequences)}
    drain_overlapped(busy.engine, answers, cancelled)
    assert busy.engine.load().used_blocks == 0
    for sequence, right in zip(sequences, expected, strict=True):
        answer = answers[sequence]
        if answer.reason is None:
            assert sequence in cancelled.values()
            assert right.text.startswith(answer.text)
        else:
            assert (answer.text, answer.reason) == (right.text, right.reason)
