"""Greedy output equals Hugging Face transformers, token for token."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.checkpoints import Reference, write_checkpoint
from tests.worker.driving import Answer, ask, load, run
from triptych.worker.engine.request import GenerationRequest, SamplingOptions
from triptych.worker.loading import LoadedModel

pytestmark = pytest.mark.slow

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
WORDS = (
    "what",
    "color",
    "is",
    "the",
    "shape",
    "left",
    "of",
    "a",
    "big",
    "red",
    "square",
    "and",
    "how",
    "many",
    "circles",
)


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """What computes the steps."""
    return str(request.param)


def mixed_requests(
    model: LoadedModel, reference: Reference, count: int, longest_words: int
) -> tuple[list[GenerationRequest], list[list[Tensor]]]:
    """Returns requests of 0 to 3 pictures and mixed lengths, and each one's pictures."""
    dice = random.Random(7)
    pixels = [reference.picture(seed) for seed in range(12)]
    features = [reference.features(picture) for picture in pixels]
    requests: list[GenerationRequest] = []
    pictures: list[list[Tensor]] = []
    for _ in range(count):
        parts: list[Any] = []
        shown: list[Tensor] = []
        for _ in range(dice.choice((0, 1, 1, 2, 3))):
            name = dice.randrange(len(pixels))
            parts.append((name, len(features[name]), features[name]))
            shown.append(pixels[name])
            if dice.random() < 0.5:
                parts.append(" ".join(dice.choices(WORDS, k=dice.randint(1, 4))))
        parts.append(" ".join(dice.choices(WORDS, k=dice.randint(1, longest_words))))
        requests.append(ask(model, *parts, max_tokens=dice.randint(2, 16)))
        pictures.append(shown)
    return requests, pictures


def assert_greedy(reference: Reference, request: GenerationRequest, answer: Answer, tolerance: float = 0.0) -> None:
    """Checks every token against the reference's choice after the same tokens before it."""
    features = [rows for rows in request.features if rows is not None]
    prompt = request.prompt.token_ids
    logits = reference.logits([*prompt, *answer.tokens[:-1]], features)[len(prompt) - 1 :]
    lost = logits.max(dim=-1).values - logits.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert (lost <= tolerance).all(), lost


def assert_equals_transformers(model: LoadedModel, reference: Reference) -> None:
    """Checks all of 200 answers token by token, and some against the literal output of `generate`, which is slow."""
    requests, pictures = mixed_requests(model, reference, 200, longest_words=40)
    answers = run(model.engine, requests)
    for request, answer in zip(requests, answers, strict=True):
        assert_greedy(reference, request, answer)
    for request, answer, shown in list(zip(requests, answers, pictures, strict=True))[::20]:
        expected = reference.generate(request.prompt.token_ids, shown, request.stopping.max_tokens)
        assert answer.tokens == expected


@pytest.mark.slow
@pytest.mark.skipif(not (DEMO / "model.safetensors").is_file(), reason="models/demo has not been trained")
def test_200_mixed_prompts_submitted_at_once_equal_transformers_on_the_demo_model(kernels: str) -> None:
    assert_equals_transformers(load(DEMO, kv_blocks=2048, kernels=kernels), Reference(DEMO))


def test_200_mixed_prompts_submitted_at_once_equal_transformers_on_random_weights(
    tiny_dir: Path, tiny_reference: Reference, kernels: str
) -> None:
    assert_equals_transformers(load(tiny_dir, kernels=kernels), tiny_reference)


def test_requests_run_one_at_a_time_equal_themselves_run_together(
    tiny_dir: Path, tiny_reference: Reference, kernels: str
) -> None:
    batched = load(tiny_dir, kernels=kernels)
    requests, _ = mixed_requests(batched, tiny_reference, 40, longest_words=30)
    together = run(batched.engine, requests)
    alone = load(tiny_dir, prefix_cache=False, kernels=kernels)
    assert [run(alone.engine, [request])[0].tokens for request in requests] == [a.tokens for a in together]


@pytest.mark.parametrize("step_token_budget", [16, 17, 64])
def test_prefill_in_chunks_of_any_size_equals_transformers(
    tiny_dir: Path, tiny_reference: Reference, step_token_budget: int, kernels: str
) -> None:
    model = load(tiny_dir, step_token_budget=step_token_budget, kernels=kernels)
    requests, _ = mixed_requests(model, tiny_reference, 20, longest_words=30)
    for request, answer in zip(requests, run(model.engine, requests), strict=True):
        assert_greedy(tiny_reference, request, answer)


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32},
        {"text_model": "qwen2"},
        {"text_model": "mistral", "sliding_window": None},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 500.0,
            }
        },
    ],
    ids=[
        "tied head",
        "as many key as query heads",
        "one key head, wide heads",
        "qwen2",
        "mistral",
        "linear rope",
        "llama3 rope",
    ],
)
def test_every_supported_variant_equals_transformers(tmp_path: Path, overrides: dict[str, Any], kernels: str) -> None:
    folder = write_checkpoint(tmp_path / "variant", **overrides)
    model, reference = load(folder, kernels=kernels), Reference(folder)
    requests, _ = mixed_requests(model, reference, 10, longest_words=20)
    for request, answer in zip(requests, run(model.engine, requests), strict=True):
        assert_greedy(reference, request, answer)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.2), ("float16", 0.03)])
def test_narrow_types_choose_tokens_that_float32_finds_almost_as_likely(
    tiny_dir: Path, tiny_reference: Reference, dtype: str, tolerance: float, kernels: str
) -> None:
    model = load(tiny_dir, dtype=dtype, kernels=kernels)
    requests, _ = mixed_requests(model, tiny_reference, 10, longest_words=20)
    for request, answer in zip(requests, run(model.engine, requests), strict=True):
        assert_greedy(tiny_reference, request, answer, tolerance)


def test_repetition_penalty_equals_transformers(tiny: LoadedModel, tiny_reference: Reference) -> None:
    picture = tiny_reference.picture(1)
    features = tiny_reference.features(picture)
    penalty = SamplingOptions(repetition_penalty=1.7)
    request = ask(tiny, ("a", len(features), features), "what is it", max_tokens=24, sampling=penalty)
    expected = tiny_reference.generate(request.prompt.token_ids, [picture], 24, repetition_penalty=1.7)
    assert run(tiny.engine, [request])[0].tokens == expected
