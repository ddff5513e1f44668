"""The engine as a whole: preemption, prefix reuse, cancellation, failures."""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.checkpoints import Reference
from tests.worker.driving import ask, drain, load, run
from triptych.errors import FeaturesRequired, InvalidRequest, Overloaded
from triptych.worker.engine.events import Failed, Text
from triptych.worker.engine.request import FinishReason, GenerationRequest, PriorityClass, SamplingOptions
from triptych.worker.engine.scheduler import StepPlan
from triptych.worker.engine.sequence import Phase, Sequence
from triptych.worker.loading import LoadedModel

LONG = "what color is the big round thing on the left side of the picture"


def picture(reference: Reference, seed: int) -> tuple[object, int, Tensor]:
    features = reference.features(reference.picture(seed))
    return seed, len(features), features


def without_features(shown: tuple[object, int, Tensor]) -> tuple[object, int, None]:
    return shown[0], shown[1], None


def varied(model: LoadedModel, reference: Reference, count: int = 8) -> list[GenerationRequest]:
    return [
        ask(model, *([picture(reference, n)] if n % 2 else []), LONG[: 10 + 5 * n], max_tokens=30, ignore_eos=True)
        for n in range(count)
    ]


# Preemption


def test_a_tiny_pool_gives_the_same_answers_as_a_roomy_one(tiny_dir: Path, tiny_reference: Reference) -> None:
    roomy, tight = load(tiny_dir), load(tiny_dir, kv_blocks=10)
    expected = [answer.tokens for answer in run(roomy.engine, varied(roomy, tiny_reference))]
    preempted: list[Sequence] = []
    watch(tight, lambda plan: preempted.extend(plan.preempted))
    assert [answer.tokens for answer in run(tight.engine, varied(tight, tiny_reference), True)] == expected
    assert preempted


def test_a_preempted_sample_continues_as_if_nothing_had_happened(tiny_dir: Path) -> None:
    def requests(model: LoadedModel) -> list[GenerationRequest]:
        return [
            ask(model, LONG[:20], max_tokens=40, ignore_eos=True, sampling=SamplingOptions(temperature=1.0, seed=n))
            for n in range(6)
        ]

    roomy = load(tiny_dir)
    tight = load(tiny_dir, kv_blocks=8, prefix_cache=False)
    expected = [(answer.tokens, answer.text) for answer in run(roomy.engine, requests(roomy))]
    assert [(answer.tokens, answer.text) for answer in run(tight.engine, requests(tight), True)] == expected


# Prefix reuse


def test_a_second_question_about_a_picture_reuses_its_kv_and_answers_the_same(
    tiny_dir: Path, tiny_reference: Reference
) -> None:
    shown = picture(tiny_reference, 1)
    cold = load(tiny_dir, prefix_cache=False)
    warm = load(tiny_dir)
    for text in (LONG, LONG, LONG + " now"):
        expected = run(cold.engine, [ask(cold, shown, text)])[0]
        answer = run(warm.engine, [ask(warm, shown, text)])[0]
        assert answer.tokens == expected.tokens
        assert expected.cached_tokens == 0
    assert answer.cached_tokens >= 64
    assert warm.engine.load().cached_blocks > 0


def test_same_text_and_two_pictures_give_two_answers(tiny: LoadedModel, tiny_reference: Reference) -> None:
    texts = [
        run(tiny.engine, [ask(tiny, picture(tiny_reference, seed), LONG, max_tokens=16)])[0].tokens for seed in range(4)
    ]
    assert len(set(map(tuple, texts))) == 4


def test_tenants_with_different_salts_share_nothing(tiny: LoadedModel) -> None:
    first, second, again = (run(tiny.engine, [ask(tiny, LONG, cache_salt=salt)])[0] for salt in "aba")
    assert second.cached_tokens == 0
    assert again.cached_tokens > 0
    assert first.tokens == second.tokens == again.tokens


def test_a_picture_without_features_needs_its_kv(tiny: LoadedModel, tiny_reference: Reference) -> None:
    shown = picture(tiny_reference, 1)
    with pytest.raises(FeaturesRequired):
        tiny.engine.submit(ask(tiny, without_features(shown), LONG))
    expected = run(tiny.engine, [ask(tiny, shown, LONG)])[0]
    answer = run(tiny.engine, [ask(tiny, without_features(shown), LONG)])[0]
    assert answer.tokens == expected.tokens
    other_salt = ask(tiny, without_features(shown), LONG, cache_salt="other")
    with pytest.raises(FeaturesRequired):
        tiny.engine.submit(other_salt)
    tiny.engine.check_integrity()


def test_kv_taken_at_submission_survives_eviction_and_preemption(tiny_dir: Path, tiny_reference: Reference) -> None:
    shown = picture(tiny_reference, 1)
    model = load(tiny_dir, kv_blocks=24, kv_reserve_share=0.0)
    expected = run(model.engine, [ask(model, shown, LONG, max_tokens=60, ignore_eos=True)])[0].tokens
    preempted: list[Sequence] = []
    watch(model, lambda plan: preempted.extend(plan.preempted))
    crowd = [ask(model, f"{n} {LONG}", max_tokens=60, ignore_eos=True) for n in range(6)]
    sequences = [model.engine.submit(request)[0] for request in crowd]
    dependent, _ = model.engine.submit(ask(model, without_features(shown), LONG, max_tokens=60, ignore_eos=True))
    sequences.append(dependent)
    answers = drain(model.engine, sequences, check_each_step=True)
    assert answers[-1].tokens == expected
    assert dependent in preempted


def test_pictures_without_features_never_block_the_pool(tiny_dir: Path, tiny_reference: Reference) -> None:
    model = load(tiny_dir, kv_blocks=16)
    shown = [picture(tiny_reference, seed) for seed in range(3)]
    text = LONG[:30]
    run(model.engine, [ask(model, one, text, max_tokens=2) for one in shown])
    accepted, refused = [], 0
    big = ask(model, LONG * 2, max_tokens=70, ignore_eos=True)
    for request in [*(ask(model, without_features(one), text, max_tokens=30) for one in shown), big]:
        try:
            accepted.append(model.engine.submit(request)[0])
        except FeaturesRequired:
            refused += 1
    answers = drain(model.engine, accepted, check_each_step=True)
    assert len(accepted) + refused == 4
    assert all(answer.reason is not None for answer in answers)


def test_coverage_counts_whole_blocks_below_the_prompts_end(tiny: LoadedModel, tiny_reference: Reference) -> None:
    shown = picture(tiny_reference, 1)
    request = ask(tiny, shown, LONG)
    assert tiny.engine.coverage(request.prompt, "").cached_tokens == 0
    run(tiny.engine, [request])
    coverage = tiny.engine.coverage(request.prompt, "")
    assert coverage.cached_tokens == (len(request.prompt.token_ids) - 1) // 16 * 16
    assert coverage.images == (True,)
    assert tiny.engine.coverage(request.prompt, "salt").images == (False,)


# Everything at once


@pytest.mark.parametrize("seed", range(2))
def test_any_mix_of_arrivals_hits_preemptions_and_cancellations_gives_the_answers_of_a_quiet_engine(
    tiny_dir: Path, tiny_reference: Reference, seed: int
) -> None:
    dice = random.Random(seed)
    quiet = load(tiny_dir, prefix_cache=False)
    busy = load(tiny_dir, kv_blocks=14, step_token_budget=dice.choice((16, 40, 200)))
    shown = [picture(tiny_reference, n) for n in range(3)]
    # The two likeliest tokens of every answer are 1e-3 or more apart, so rounding cannot swap them.
    questions = [((), LONG[:40]), ((0,), LONG[:33]), ((0,), LONG[:50]), ((1,), "hm"), ((2, 0), LONG[:20]), ((), "a")]
    expected: dict[int, list[int]] = {}
    live: dict[Sequence, int] = {}
    ended = 0
    for _ in range(150):
        if dice.random() < 0.4:
            number = dice.randrange(len(questions))
            names, text = questions[number]
            bare = dice.random() < 0.5
            images = [without_features(shown[name]) if bare else shown[name] for name in names]
            priority = dice.choice(list(PriorityClass))
            ask_busy = ask(busy, *images, text, max_tokens=60, ignore_eos=True, priority=priority)
            try:
                live[busy.engine.submit(ask_busy)[0]] = number
            except FeaturesRequired:
                assert bare
        if live and dice.random() < 0.1:
            gone = dice.choice(list(live))
            busy.engine.cancel(gone)
            del live[gone]
        for sequence, event in busy.engine.step():
            if isinstance(event, Failed):  # KV was evicted from the device while the rest of it came up.
                assert isinstance(event.error, FeaturesRequired)
                assert None in sequence.request.features
                del live[sequence]
        busy.engine.check_integrity()
        for sequence in [one for one in live if one.phase is Phase.ENDED]:
            number = live.pop(sequence)
            if number not in expected:
                names, text = questions[number]
                cold = ask(quiet, *(shown[name] for name in names), text, max_tokens=60, ignore_eos=True)
                expected[number] = run(quiet.engine, [cold])[0].tokens
            assert sequence.token_ids[len(sequence.request.prompt.token_ids) :] == expected[number]
            ended += 1
    assert ended
    assert all(answer.reason is FinishReason.LENGTH for answer in drain(busy.engine, list(live), True))


# Ending


def test_reasons_tokens_and_text_agree(tiny: LoadedModel) -> None:
    whole = run(tiny.engine, [ask(tiny, LONG, max_tokens=40, ignore_eos=True)])[0]
    assert whole.reason is FinishReason.LENGTH
    assert whole.usage is not None
    assert whole.usage.output_tokens == len(whole.tokens) == 40
    assert all(whole.texts)
    stop = whole.text[4:7]
    place = whole.text.index(stop)
    stopped = run(tiny.engine, [ask(tiny, LONG, max_tokens=40, ignore_eos=True, stop=(stop,))])[0]
    assert stopped.reason is FinishReason.STOP
    assert stopped.text == whole.text[:place]
    assert all(stopped.texts)


def test_the_end_token_ends_the_answer_and_is_no_text(tiny_dir: Path) -> None:
    model = load(tiny_dir)
    whole = run(model.engine, [ask(model, LONG, max_tokens=12, ignore_eos=True)])[0]
    model.engine._end_token_ids = frozenset({whole.tokens[5]})
    answer = run(model.engine, [ask(model, LONG, max_tokens=12)])[0]
    assert answer.reason is FinishReason.END
    assert answer.tokens == whole.tokens[: whole.tokens.index(whole.tokens[5]) + 1]
    assert whole.text.startswith(answer.text)


# Refusal


def test_what_can_never_fit_is_refused_and_the_message_names_the_knob(tiny_dir: Path) -> None:
    model = load(tiny_dir, kv_blocks=8)
    with pytest.raises(InvalidRequest, match="kv_blocks or kv_cache_bytes") as caught:
        model.engine.submit(ask(model, LONG, max_tokens=100))
    assert caught.value.reason == "PROMPT_TOO_LONG"
    roomy = load(tiny_dir)
    with pytest.raises(InvalidRequest, match="the model's context"):
        roomy.engine.submit(ask(roomy, LONG, max_tokens=500))
    fits = ask(model, LONG, max_tokens=128 - len(ask(model, LONG).prompt.token_ids), ignore_eos=True)
    assert run(model.engine, [fits])[0].reason is FinishReason.LENGTH


def test_a_full_queue_refuses_at_once(tiny_dir: Path) -> None:
    model = load(tiny_dir, max_waiting=2)
    accepted = [model.engine.submit(ask(model, LONG))[0] for _ in range(2)]
    with pytest.raises(Overloaded, match="max_waiting=2"):
        model.engine.submit(ask(model, LONG))
    assert all(answer.reason for answer in drain(model.engine, accepted))


# Cancellation


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9], ids=["waiting", "prefilling", "prefilling on", "decoding", "late"])
def test_cancelling_at_any_stage_frees_everything_at_once(
    tiny_dir: Path, tiny_reference: Reference, steps: int
) -> None:
    model = load(tiny_dir, step_token_budget=32)
    sequence, _ = model.engine.submit(ask(model, picture(tiny_reference, 1), LONG, max_tokens=40, ignore_eos=True))
    for _ in range(steps):
        model.engine.step()
    assert sequence.phase is not Phase.ENDED
    model.engine.cancel(sequence)
    model.engine.check_integrity()
    assert model.engine.load().used_blocks == 0
    assert not model.engine.has_work


def test_cancelling_after_the_last_token_does_nothing(tiny: LoadedModel) -> None:
    sequence, _ = tiny.engine.submit(ask(tiny, LONG, max_tokens=3, ignore_eos=True))
    drain(tiny.engine, [sequence])
    tiny.engine.cancel(sequence)
    tiny.engine.check_integrity()
    assert tiny.engine.load().used_blocks == 0


def test_cancelling_a_waiting_request_that_pins_kv_gives_it_back(tiny: LoadedModel, tiny_reference: Reference) -> None:
    shown = picture(tiny_reference, 1)
    run(tiny.engine, [ask(tiny, shown, LONG)])
    sequence, _ = tiny.engine.submit(ask(tiny, without_features(shown), LONG))
    assert tiny.engine.load().used_blocks > 0
    tiny.engine.cancel(sequence)
    tiny.engine.check_integrity()
    assert tiny.engine.load().used_blocks == 0


# Failure


def watch(model: LoadedModel, look: Callable[[StepPlan], Any]) -> None:
    """Calls a function with every plan before it runs."""
    start_plan = model.engine.runner.start

    def watched(plan: StepPlan) -> Any:
        look(plan)
        return start_plan(plan)

    model.engine.runner.start = watched  # type: ignore[method-assign]


def test_an_exception_in_a_step_fails_those_who_took_part_and_nobody_else(
    tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(tiny_dir, max_running=2)
    armed = [True]

    def explode(plan: StepPlan) -> None:
        if armed and plan.decodes:
            armed.clear()
            raise RuntimeError("a secret detail")

    watch(model, explode)
    with caplog.at_level(logging.ERROR):
        answers = run(model.engine, [ask(model, f"{n} {LONG}", max_tokens=5, ignore_eos=True) for n in range(4)])
    assert [answer.error is not None for answer in answers] == [True, True, False, False]
    assert "secret" not in str(answers[0].error)
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert [answer.reason for answer in answers[2:]] == [FinishReason.LENGTH] * 2


def test_a_broken_answer_fails_alone(tiny: LoadedModel) -> None:
    sequences = [tiny.engine.submit(ask(tiny, f"{n} {LONG}", max_tokens=5, ignore_eos=True))[0] for n in range(3)]
    sequences[1].text = None  # type: ignore[assignment]
    answers = drain(tiny.engine, sequences)
    assert [answer.error is not None for answer in answers] == [False, True, False]


def test_numbers_that_are_not_finite_fail_their_request_and_never_reach_another(
    tiny_dir: Path, tiny_reference: Reference
) -> None:
    clean, model = load(tiny_dir), load(tiny_dir, kv_blocks=14)
    expected = run(clean.engine, [ask(clean, LONG, max_tokens=20, ignore_eos=True)])[0].tokens
    poison = torch.full((16, 64), torch.nan)  # Intake refuses this; sums in narrow types can come to it.
    bad = ask(model, ("poison", 16, poison), LONG)
    good = ask(model, LONG, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        answers = run(model.engine, [bad, good])
        assert answers[0].error is not None
        assert answers[0].error.reason == "NOT_FINITE"
        assert answers[1].tokens == expected
    cache = model.engine.runner.cache
    assert all(tensor.isfinite().all() for tensor in (*cache.keys, *cache.values))


def test_events_of_a_step_say_how_many_tokens_each_piece_of_text_stands_for(tiny: LoadedModel) -> None:
    sequence, queued = tiny.engine.submit(ask(tiny, "hi", max_tokens=30, ignore_eos=True))
    assert queued.prompt_tokens == len(sequence.request.prompt.token_ids)
    counted = 0
    while tiny.engine.has_work:
        for _, event in tiny.engine.step():
            counted += event.token_count if isinstance(event, Text) else 0
    assert counted + sequence.unsent_tokens == 30


def test_the_timeline_tells_the_stages_in_order(tiny_dir: Path, tiny_reference: Reference) -> None:
    model = load(tiny_dir, step_token_budget=32)
    shown = picture(tiny_reference, 3)
    sequence, _ = model.engine.submit(ask(model, shown, LONG, max_tokens=4, ignore_eos=True))
    drain(model.engine, [sequence])
    timeline = sequence.timeline
    assert sum(chunk.tokens for chunk in timeline.chunks) == len(sequence.request.prompt.token_ids)
    assert sum(chunk.visual_tokens for chunk in timeline.chunks) == shown[1]
    times = [time for chunk in timeline.chunks for time in (chunk.start_ns, chunk.end_ns)]
    assert timeline.first_token_ns == times[-1]
    assert timeline.last_token_ns is not None
    assert [*times, timeline.last_token_ns] == sorted([*times, timeline.last_token_ns])
