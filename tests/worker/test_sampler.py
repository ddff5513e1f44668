"""Sampling against exact probabilities."""

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triptych.worker.engine.request import SamplingOptions
from triptych.worker.engine.sampler import TokenChooser, choose_tokens

CPU = torch.device("cpu")
VOCABULARY = 12
PROMPT = (1, 3, 3)


def chooser(options: SamplingOptions, prompt: tuple[int, ...] = PROMPT) -> TokenChooser:
    return TokenChooser(options, prompt, VOCABULARY, CPU)


def logits_of(seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def exact(logits: Tensor, options: SamplingOptions) -> Tensor:
    """Returns the distribution that Hugging Face's processors give."""
    processors = LogitsProcessorList()
    if options.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    processors.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        processors.append(TopPLogitsWarper(options.top_p))
    probabilities: Tensor = processors(torch.tensor([PROMPT]), logits.clone()).softmax(-1)[0]
    return probabilities


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0, seed=1),
        SamplingOptions(temperature=0.3, seed=2),
        SamplingOptions(temperature=3.0, top_k=4, seed=3),
        SamplingOptions(temperature=1.0, top_p=0.7, seed=4),
        SamplingOptions(temperature=1.5, top_k=6, top_p=0.8, repetition_penalty=1.8, seed=5),
        SamplingOptions(temperature=1.0, repetition_penalty=0.5, seed=6),
    ],
    ids=str,
)
def test_frequencies_approach_the_exact_probabilities(options: SamplingOptions) -> None:
    logits = logits_of(11)
    expected = exact(logits, options)
    draws = 20_000
    # One sequence's noise, twenty thousand times the same row: rows take their numbers in order.
    tokens = choose_tokens(logits.expand(draws, -1), [chooser(options)] * draws)
    counts = torch.bincount(tokens, minlength=VOCABULARY)
    assert (counts[expected == 0] == 0).all()
    # Pearson's chi-squared; for up to 11 degrees of freedom, 40 is beyond the 1 - 4e-5 quantile.
    possible = expected > 0
    deviation = (counts[possible] - draws * expected[possible]) ** 2 / (draws * expected[possible])
    assert deviation.sum() < 40


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0),
        SamplingOptions(temperature=0.7, top_k=3),  # As many pieces of the vocabulary have a largest token, or fewer:
        SamplingOptions(temperature=0.7, top_k=300),
        SamplingOptions(temperature=1.0, top_p=0.3),
        SamplingOptions(temperature=1.0, top_p=0.999),
        SamplingOptions(temperature=1.0, top_k=50, top_p=0.9),
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.1, 3.0], ids=["flat", "peaked"])
def test_even_noise_gives_every_token_of_a_large_vocabulary_its_share(options: SamplingOptions, spread: float) -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(8)) * spread
    draws = 4000
    even = chooser(options)
    noise = iter([(number + 0.5) / draws for number in range(draws)])
    even.draw = lambda: next(noise)  # type: ignore[method-assign]
    tokens = choose_tokens(logits.expand(draws, -1), [even] * draws)
    counts = torch.bincount(tokens, minlength=1000)
    assert ((counts - draws * exact(logits, options)).abs() < 1.1).all()


def test_greedy_takes_the_most_likely_token_and_temperature_near_zero_is_greedy() -> None:
    logits = logits_of(3, rows=4)
    for temperature in (0.0, 1e-9, 1e-300):
        choosers = [chooser(SamplingOptions(temperature=temperature))] * 4
        assert choose_tokens(logits, choosers).tolist() == logits.argmax(-1).tolist()


def test_top_k_of_one_and_a_tiny_top_p_leave_only_the_most_likely_token() -> None:
    logits = logits_of(4, rows=2)
    options = [SamplingOptions(temperature=5.0, top_k=1), SamplingOptions(temperature=5.0, top_p=1e-9)]
    assert choose_tokens(logits, [chooser(option) for option in options]).tolist() == logits.argmax(-1).tolist()


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    seeded = SamplingOptions(temperature=1.0, top_p=0.9, seed=42)
    rows = logits_of(5, rows=30)
    alone = chooser(seeded)
    expected = [int(choose_tokens(row[None], [alone])) for row in rows]
    crowded = chooser(seeded)
    others = [SamplingOptions(), SamplingOptions(temperature=2.0), SamplingOptions(temperature=1.0, top_k=2)]
    got = []
    for step, row in enumerate(rows):
        company = [chooser(option) for option in others[: step % 4]]
        batch = torch.cat([logits_of(100 + step, rows=len(company)), row[None]])
        got.append(int(choose_tokens(batch, [*company, crowded])[-1]))
    assert got == expected


def test_without_a_seed_two_requests_differ() -> None:
    logits = torch.zeros(50, VOCABULARY)
    first, second = ([chooser(SamplingOptions(temperature=1.0))] * 50 for _ in range(2))
    assert choose_tokens(logits, first).tolist() != choose_tokens(logits, second).tolist()


def test_an_impossible_token_is_never_drawn_even_by_the_largest_noise() -> None:
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, :3] = torch.tensor([0.3, 0.1, 0.2])
    for options in ({}, {"top_k": 2}, {"top_p": 0.999999}):
        extreme = chooser(SamplingOptions(temperature=1.0, **options))
        extreme.draw = lambda: 1.0 - 2.0**-24  # type: ignore[method-assign]
        assert choose_tokens(logits, [extreme]).item() in (0, 2) if "top_k" in options else (0, 1, 2)


def test_generated_tokens_are_penalized_like_those_of_the_prompt() -> None:
    penalized = chooser(SamplingOptions(repetition_penalty=10.0))
    logits = torch.arange(VOCABULARY, dtype=torch.float32)[None]
    order = []
    for _ in range(3):
        order.append(int(choose_tokens(logits, [penalized])))
        penalized.note(order[-1])
    assert order == [11, 10, 9]


def test_logits_are_not_changed() -> None:
    logits = logits_of(6)
    before = logits.clone()
    choose_tokens(logits, [chooser(SamplingOptions(temperature=1.0, top_k=3, repetition_penalty=2.0))])
    assert torch.equal(logits, before)
