"""A draft model makes fewer steps, and never another answer."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.checkpoints import Reference, write_checkpoint
from tests.worker.driving import Answer, ask, load, run
from triptych.config import WorkerSettings
from triptych.worker.engine.draft_model import DraftModel
from triptych.worker.engine.request import GenerationRequest, SamplingOptions
from triptych.worker.kv.cache import block_bytes
from triptych.worker.loading import LoadedModel, load_model

WORDS = "what is left of the red square and what is left of the blue one"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"top_logprobs": 2},
    {"temperature": 0.8, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape and other random weights: as a draft it is mostly wrong."""
    folder = tmp_path_factory.mktemp("checkpoints") / "other"
    return write_checkpoint(
        folder, seed=7, hidden_size=48, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1
    )


def drafted(folder: Path, draft: Path, **settings: Any) -> LoadedModel:
    return load(folder, draft_model=draft, **{"speculative_tokens": 5, **settings})


def drafts_of(model: LoadedModel) -> DraftModel:
    draft_model = model.engine._draft_model
    assert draft_model is not None
    return draft_model


def requests_for(model: LoadedModel, reference: Reference, count: int = 8) -> list[GenerationRequest]:
    """Requests with and without pictures, greedy and sampled, of different lengths."""
    found = []
    for index in range(count):
        features = reference.features(reference.picture(index))
        picture = [(index, len(features), features)] if index % 3 else []
        sampling = SamplingOptions(seed=index, **OPTIONS[index % len(OPTIONS)])
        words = f"{index} {WORDS[: 7 * index + 3]}"
        found.append(ask(model, *picture, words, max_tokens=20 + index, ignore_eos=True, sampling=sampling))
    return found


def answers_of(answers: list[Answer]) -> list[tuple[list[int], str, object]]:
    return [(answer.tokens, answer.text, answer.usage) for answer in answers]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kv_blocks", [24, 256], ids=["tight", "roomy"])
@pytest.mark.parametrize("own", [True, False], ids=["perfect", "random"])
def test_answers_are_the_same_with_and_without_a_draft_model(
    tiny_dir: Path, other_dir: Path, tiny_reference: Reference, kernels: str, kv_blocks: int, own: bool
) -> None:
    plain = load(tiny_dir, kernels=kernels, prefix_cache=False)
    model = drafted(tiny_dir, tiny_dir if own else other_dir, kernels=kernels, kv_blocks=kv_blocks, prefix_cache=False)
    requests = requests_for(plain, tiny_reference)
    expected = run(plain.engine, requests)
    assert answers_of(run(model.engine, requests, check_each_step=True)) == answers_of(expected)


def test_the_model_as_its_own_draft_is_always_right_and_a_random_one_hardly_ever(
    tiny_dir: Path, other_dir: Path
) -> None:
    rates = []
    for draft in (tiny_dir, other_dir):
        model = drafted(tiny_dir, draft)
        run(model.engine, [ask(model, f"{n} {WORDS}", max_tokens=40, ignore_eos=True) for n in range(3)])
        rates.append(model.engine.confirmed_tokens / model.engine.guessed_tokens)
    assert rates[0] == 1.0
    assert rates[1] < 0.2


def test_a_perfect_draft_saves_steps(tiny_dir: Path) -> None:
    model = drafted(tiny_dir, tiny_dir, speculative_tokens=15)
    sequence, _ = model.engine.submit(ask(model, WORDS, max_tokens=64, ignore_eos=True))
    steps = 0
    while model.engine.has_work:
        model.engine.step()
        steps += 1
    assert sequence.output_tokens == 64 and steps <= 8


def test_int8_weights_of_the_model_itself_guess_well(tiny_dir: Path) -> None:
    model, plain = drafted(tiny_dir, tiny_dir, draft_weights="int8"), load(tiny_dir)
    requests = [ask(model, f"{n} {WORDS}", max_tokens=40, ignore_eos=True) for n in range(3)]
    assert answers_of(run(model.engine, requests)) == answers_of(run(plain.engine, requests))
    assert model.engine.confirmed_tokens > 0.5 * model.engine.guessed_tokens


def test_a_cancel_frees_the_drafts_blocks_and_a_preemption_breaks_nothing(tiny_dir: Path) -> None:
    model = drafted(tiny_dir, tiny_dir, kv_blocks=16)
    engine = model.engine
    sequences = [engine.submit(ask(model, f"{n} {WORDS}", max_tokens=60, ignore_eos=True))[0] for n in range(4)]
    for _ in range(4):
        engine.step()
        engine.check_integrity()
    assert drafts_of(model)._pool.owned > 0
    engine.start()
    engine.cancel(sequences[0])
    engine.finish()
    engine.check_integrity()
    for sequence in sequences[1:]:
        engine.cancel(sequence)
    engine.check_integrity()
    assert drafts_of(model)._pool.owned == 0


def test_a_long_prompt_is_drafted_in_pieces_of_the_token_budget(tiny_dir: Path) -> None:
    model, plain = drafted(tiny_dir, tiny_dir, step_token_budget=16), load(tiny_dir)
    request = ask(model, WORDS * 3, max_tokens=40, ignore_eos=True)
    assert answers_of(run(model.engine, [request])) == answers_of(run(plain.engine, [request]))
    assert model.engine.confirmed_tokens > 10


def test_a_draft_with_a_shorter_context_stops_guessing_there(tiny_dir: Path, tmp_path: Path) -> None:
    short = write_checkpoint(tmp_path / "short", max_position_embeddings=128)
    model, plain = drafted(tiny_dir, short), load(tiny_dir)
    request = ask(model, "x" * 100, max_tokens=100, ignore_eos=True)
    assert answers_of(run(model.engine, [request])) == answers_of(run(plain.engine, [request]))
    assert 0 < model.engine.guessed_tokens < 40


def test_a_draft_model_that_fails_is_not_asked_again_and_hurts_nobody(
    tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = drafted(tiny_dir, tiny_dir), load(tiny_dir)
    requests = [ask(model, f"{n} {WORDS}", max_tokens=10, ignore_eos=True) for n in range(2)]

    def explode(*_: object, **__: object) -> Any:
        raise RuntimeError("lost")

    drafts_of(model)._backend.start = explode  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        assert answers_of(run(model.engine, requests)) == answers_of(run(plain.engine, requests))
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_a_draft_whose_numbers_are_not_finite_guesses_nothing_and_spoils_nothing(tiny_dir: Path) -> None:
    model, plain = drafted(tiny_dir, tiny_dir), load(tiny_dir)
    draft_model = drafts_of(model)
    draft_model._embedding = draft_model._embedding.clone()
    digit = plain.prompts.text_decoder.token_to_id("7")
    draft_model._embedding[digit] = torch.nan
    requests = [ask(model, f"{n} {WORDS}", max_tokens=20, ignore_eos=True) for n in (7, 8)]
    answers = run(model.engine, requests)
    assert answers_of(answers) == answers_of(run(plain.engine, requests))
    assert all(tensor.isfinite().all() for tensor in draft_model._cache.keys)


def test_what_cannot_guess_for_the_model_is_refused_and_the_message_says_why(tiny_dir: Path, tmp_path: Path) -> None:
    wide = write_checkpoint(tmp_path / "wide", vocab_size=300)
    with pytest.raises(ValueError, match="vocabulary of 300 tokens"):
        drafted(tiny_dir, wide)
    renamed = write_checkpoint(tmp_path / "renamed")
    tokenizer = (renamed / "tokenizer.json").read_text("utf-8")
    (renamed / "tokenizer.json").write_text(tokenizer.replace("<|user|>", "<|human|>"), "utf-8")
    with pytest.raises(ValueError, match="another tokenizer"):
        drafted(tiny_dir, renamed)
    mute = write_checkpoint(tmp_path / "mute")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (mute / name).unlink()
    with pytest.raises(ValueError, match="mute has no tokenizer"):
        drafted(tiny_dir, mute)
    with pytest.raises(ValueError, match="speculative_tokens"):
        drafted(tiny_dir, tiny_dir, speculative_tokens=0)
    with pytest.raises(FileNotFoundError, match="not a Hugging Face checkpoint"):
        drafted(tiny_dir, tmp_path / "nothing")


def test_both_models_share_the_memory_for_kv(tiny_dir: Path, other_dir: Path) -> None:
    def blocks(**given: Any) -> int:
        settings = WorkerSettings(model_dir=tiny_dir, device="cpu", threads=1, kv_cache_bytes=1 << 20, **given)
        return load_model(settings).engine.load().total_blocks

    model = load(tiny_dir)
    own = block_bytes(model.config.decoder, torch.float32)
    assert blocks() == (1 << 20) // own
    assert blocks(draft_model=tiny_dir, speculative_tokens=3) == (1 << 20) // (2 * own)
