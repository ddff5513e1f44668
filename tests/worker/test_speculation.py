"""Guessing tokens makes fewer steps, and never another answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.checkpoints import Reference
from tests.worker.driving import ask, load, run
from triptych.worker.engine.engine import Engine
from triptych.worker.engine.events import Text
from triptych.worker.engine.request import GenerationRequest, SamplingOptions
from triptych.worker.engine.speculation import GRAM, Guesser
from triptych.worker.loading import LoadedModel


def test_what_followed_the_same_tokens_last_time_is_the_guess() -> None:
    guesser = Guesser(never=None)
    assert guesser.guess([1, 2, 3, 4, 5, 1, 2, 3], 2) == (4, 5)
    assert guesser.guess([1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 3], 2) == (9, 1)


def test_without_a_repetition_nothing_is_guessed() -> None:
    assert Guesser(never=None).guess(list(range(50)), 5) == ()
    assert Guesser(never=None).guess([1, 2], 5) == ()


def test_a_guess_ends_before_an_image() -> None:
    assert Guesser(never=7).guess([1, 2, 3, 4, 7, 7, 1, 2, 3], 5) == (4,)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_a_guess_is_what_stands_behind_the_latest_earlier_run(tokens: list[int], most: int) -> None:
    grown = Guesser(never=None)
    for end in range(1, len(tokens)):  # Asked after every token, as the engine does.
        grown.guess(tokens[:end], most)
    found = [end for end in range(GRAM, len(tokens)) if tokens[end - GRAM : end] == tokens[-GRAM:]]
    expected = tuple(tokens[found[-1] : found[-1] + most]) if found else ()
    assert grown.guess(tokens, most) == Guesser(never=None).guess(tokens, most) == expected


class Foreknowing(Guesser):
    """Knows the answer, but errs at every `wrong`th token."""

    def __init__(self, tokens: Sequence[int], wrong: int) -> None:
        super().__init__(never=None)
        self._tokens = [token ^ 1 if index % wrong == 0 else token for index, token in enumerate(tokens)]

    def guess(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        return tuple(self._tokens[len(token_ids) : len(token_ids) + most])


def texts_of(engine: Engine) -> tuple[list[Text], int]:
    """Runs all there is; returns the pieces of text and how many steps they took."""
    texts: list[Text] = []
    steps = 0
    while engine.has_work:
        texts += [event for _, event in engine.step() if isinstance(event, Text)]
        engine.check_integrity()
        steps += 1
    return texts, steps


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("wrong", [1, 3, 1000], ids=["always wrong", "sometimes wrong", "always right"])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "top_p": 0.9, "seed": 5}, {"top_logprobs": 2}],
    ids=["greedy", "sampled", "logprobs"],
)
def test_right_guesses_save_steps_and_wrong_ones_change_nothing(
    tiny_dir: Path, tiny_reference: Reference, kernels: str, wrong: int, options: dict[str, Any]
) -> None:
    features = tiny_reference.features(tiny_reference.picture(1))

    def request(model: LoadedModel) -> GenerationRequest:
        sampling = SamplingOptions(**options)
        return ask(model, (1, len(features), features), "what is it", max_tokens=60, ignore_eos=True, sampling=sampling)

    plain = load(tiny_dir, kernels=kernels)
    first, _ = plain.engine.submit(request(plain))
    expected, _ = texts_of(plain.engine)
    model = load(tiny_dir, kernels=kernels, speculative_tokens=7)
    sequence, _ = model.engine.submit(request(model))
    sequence.guesser = Foreknowing(first.token_ids, wrong)
    texts, steps = texts_of(model.engine)
    assert sequence.token_ids == first.token_ids
    for part in (lambda e: e.text, lambda e: e.token_count, lambda e: len(e.choices)):
        assert [part(event) for event in texts] == [part(event) for event in expected]
    assert steps <= {1: 61, 3: 45, 1000: 20}[wrong]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kv_blocks", [24, 256], ids=["tight", "roomy"])
def test_answers_of_a_batch_are_the_same_with_and_without_guesses(
    tiny_dir: Path, tiny_reference: Reference, kernels: str, kv_blocks: int
) -> None:
    plain, guessing = load(tiny_dir, kernels=kernels), load(tiny_dir, kv_blocks=kv_blocks, speculative_tokens=7)
    features = [tiny_reference.features(tiny_reference.picture(seed)) for seed in range(3)]
    words = "what is left of the red square and what is left of the blue one " * 2
    requests = [
        ask(
            plain,
            (index % 3, len(features[index % 3]), features[index % 3]),
            words,
            max_tokens=40,
            sampling=SamplingOptions(temperature=index % 2 * 0.8, seed=index, repetition_penalty=1 + index % 3 * 0.2),
        )
        for index in range(8)
    ]
    assert [a.tokens for a in run(guessing.engine, requests)] == [a.tokens for a in run(plain.engine, requests)]
