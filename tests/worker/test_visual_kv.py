"""Visual KV policies through the engine: what they give, what they free, and whom they leave alone."""

import random
from pathlib import Path

import pytest
import torch

from tests.worker.checkpoints import write_checkpoint
from tests.worker.driving import Answer, ask, drain, load, run
from triptych.errors import FeaturesRequired, InvalidRequest
from triptych.visual_kv import VisualKvPolicy
from triptych.worker.engine.request import GenerationRequest
from triptych.worker.engine.sequence import Phase, Sequence
from triptych.worker.kv.identity import VisualSpan
from triptych.worker.kv.low_rank import FILE_NAME, Fit
from triptych.worker.kv.merging import merge_tokens
from triptych.worker.kv.visual import visual_blocks
from triptych.worker.loading import LoadedModel
from triptych.worker.model.weights import fingerprint

LONG = "what color is the big round thing on the left"
POLICIES = [policy for policy in VisualKvPolicy if policy is not VisualKvPolicy.EXACT]
TOKENS = 100
"""Of a picture here: it covers five or six whole blocks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with principal components of noise: good for nothing, but there."""
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "visual")
    fit = Fit(2)
    dice = torch.Generator().manual_seed(0)
    for layer in range(2):
        fit.add(layer, *torch.randn(2, 200, 2, 16, generator=dice))
    fit.basis().save(folder / FILE_NAME, fingerprint(folder))
    return folder


def picture(seed: int) -> tuple[object, int, torch.Tensor]:
    return seed, TOKENS, torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(seed))


def about(
    model: LoadedModel, seed: int, policy: VisualKvPolicy, text: str = LONG, max_tokens: int = 30
) -> GenerationRequest:
    return ask(model, picture(seed), text, max_tokens=max_tokens, ignore_eos=True, visual_kv=policy)


def reported(answer: Answer) -> tuple[VisualKvPolicy, bool]:
    assert answer.completed is not None
    return answer.completed.visual_kv, answer.completed.saved_bytes > 0


def test_only_blocks_that_are_all_one_images_count_as_visual() -> None:
    def blocks(*spans: tuple[int, int]) -> list[list[int]]:
        return [list(run) for run in visual_blocks([VisualSpan(start, count, b"") for start, count in spans])]

    assert blocks((0, 64)) == [[0, 1, 2, 3]]
    assert blocks((1, 64)) == [[1, 2, 3]]
    assert blocks((1, 30)) == []
    assert blocks((1, 40), (41, 40)) == [[1], [3, 4]]


# Offloading


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_an_offloaded_answer_is_the_exact_one_token_for_token(folder: Path, kernels: str) -> None:
    exact, offloading = load(folder, kernels=kernels), load(folder, kernels=kernels)
    for seed in range(3):
        expected = run(exact.engine, [about(exact, seed, VisualKvPolicy.EXACT)])[0]
        answer = run(offloading.engine, [about(offloading, seed, VisualKvPolicy.OFFLOAD)], check_each_step=True)[0]
        assert answer.tokens == expected.tokens
        assert answer.text == expected.text
        assert reported(answer) == (VisualKvPolicy.OFFLOAD, True)
        assert reported(expected) == (VisualKvPolicy.EXACT, False)


def test_offloading_a_reused_picture_or_two_pictures_changes_nothing_either(folder: Path) -> None:
    exact, offloading = load(folder, prefix_cache=False), load(folder)
    for text in (LONG, LONG + " side", "hm"):
        questions = [
            ask(m, picture(1), text, picture(2), text, max_tokens=20, ignore_eos=True, visual_kv=policy)
            for m, policy in ((exact, VisualKvPolicy.EXACT), (offloading, VisualKvPolicy.OFFLOAD))
        ]
        expected, answer = (run(m.engine, [q])[0] for m, q in zip((exact, offloading), questions, strict=True))
        assert answer.tokens == expected.tokens
    assert answer.cached_tokens >= TOKENS - 4


def test_without_room_in_host_memory_a_request_stays_on_the_device(folder: Path) -> None:
    small = load(folder, offload_kv_bytes=4 * 8192)
    answer = run(small.engine, [about(small, 1, VisualKvPolicy.OFFLOAD)])[0]
    assert reported(answer) == (VisualKvPolicy.EXACT, False)
    none = load(folder, offload_kv_bytes=0)
    with pytest.raises(InvalidRequest, match="offload_kv_bytes"):
        none.engine.submit(about(none, 1, VisualKvPolicy.OFFLOAD))


# Every policy


@pytest.mark.parametrize("policy", POLICIES)
def test_device_blocks_are_free_for_others_while_the_answer_goes_on(folder: Path, policy: VisualKvPolicy) -> None:
    model = load(folder, prefix_cache=False)
    sequence, _ = model.engine.submit(about(model, 1, policy))
    model.engine.step()
    whole = model.engine.load().used_blocks
    model.engine.step()
    model.engine.check_integrity()
    # 100 tokens behind one token of text: blocks 1 to 5 are visual, and two hold what is left of five at ratio 4.
    assert model.engine.load().used_blocks == whole - 5 + (0 if policy is VisualKvPolicy.OFFLOAD else 2)
    drain(model.engine, [sequence], check_each_step=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_exact_requests_in_the_same_steps_get_the_same_bits(folder: Path, policy: VisualKvPolicy) -> None:
    def logits(others: VisualKvPolicy | None) -> list[torch.Tensor]:
        model = load(folder)
        backend, seen = model.engine.runner.backend, list[torch.Tensor]()
        if type(backend).__name__ == "TorchBackend":
            pytest.skip("torch's products depend on how many rows there are")
        sequences = [model.engine.submit(about(model, 1, VisualKvPolicy.EXACT))[0]]
        if others is not None:
            sequences += [model.engine.submit(about(model, seed, others))[0] for seed in (1, 2)]
        while sequences[0].phase is not Phase.ENDED:
            model.engine.step()
            blocks, computed = sequences[0].blocks, sequences[0].computed
            for tensor in model.engine.runner.cache.keys:
                seen.append(tensor[blocks].flatten(0, 1)[:computed].clone())
        drain(model.engine, sequences)
        return seen

    with_exact, with_policy = logits(VisualKvPolicy.EXACT), logits(policy)
    assert len(with_exact) == len(with_policy)
    assert all(map(torch.equal, with_exact, with_policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exact_request_after_others_hits_only_exact_kv(folder: Path, policy: VisualKvPolicy) -> None:
    cold, warm = load(folder, prefix_cache=False), load(folder)
    first = run(warm.engine, [about(warm, 1, policy)])[0]
    said = first.text
    for text in (LONG, LONG + said, LONG + said[:3]):
        expected = run(cold.engine, [about(cold, 1, VisualKvPolicy.EXACT, text)])[0]
        answer = run(warm.engine, [about(warm, 1, VisualKvPolicy.EXACT, text)])[0]
        assert answer.tokens == expected.tokens
        assert answer.cached_tokens >= TOKENS - 4
        assert reported(answer) == (VisualKvPolicy.EXACT, False)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_a_cancelled_request_gives_everything_back_in_every_phase(
    folder: Path, policy: VisualKvPolicy, steps: int
) -> None:
    model = load(folder, step_token_budget=60)
    sequence, _ = model.engine.submit(about(model, 1, policy))
    for _ in range(steps):
        model.engine.step()
    model.engine.cancel(sequence)
    model.engine.check_integrity()
    assert model.engine.load().used_blocks == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_many_requests_in_a_tight_pool_are_preempted_and_all_end(folder: Path, policy: VisualKvPolicy) -> None:
    dice = random.Random(0)
    roomy, tight = load(folder), load(folder, kv_blocks=22, step_token_budget=64)
    policies = [dice.choice([policy, VisualKvPolicy.EXACT]) for _ in range(8)]
    expected = [run(roomy.engine, [about(roomy, n, VisualKvPolicy.EXACT)])[0].tokens for n in range(8)]
    sequences = [tight.engine.submit(about(tight, n, one))[0] for n, one in enumerate(policies)]
    preempted: set[Sequence] = set()
    running: set[Sequence] = set()
    while any(sequence.phase is not Phase.ENDED for sequence in sequences):
        tight.engine.step()
        tight.engine.check_integrity()
        preempted |= {one for one in running if one.phase is Phase.WAITING}
        running = {one for one in sequences if one.phase in (Phase.PREFILL, Phase.DECODE)}
    assert preempted
    for sequence, tokens, one in zip(sequences, expected, policies, strict=True):
        if not one.lossy:
            assert sequence.token_ids[len(sequence.request.prompt.token_ids) :] == tokens
    assert tight.engine.load().used_blocks == 0


def test_images_without_features_are_refused_though_their_kv_is_cached(folder: Path) -> None:
    model = load(folder)
    run(model.engine, [about(model, 1, VisualKvPolicy.EXACT)])
    name, count, _ = picture(1)
    request = ask(model, (name, count, None), LONG, visual_kv=VisualKvPolicy.OFFLOAD)
    with pytest.raises(FeaturesRequired):
        model.engine.submit(request)


def test_low_rank_needs_components_fitted_for_these_weights(folder: Path, tmp_path: Path) -> None:
    bare = load(write_checkpoint(tmp_path / "bare"))
    with pytest.raises(InvalidRequest, match="triptych compress"):
        bare.engine.submit(about(bare, 1, VisualKvPolicy.LOW_RANK))
    other = write_checkpoint(tmp_path / "other", seed=1)
    (other / FILE_NAME).write_bytes((folder / FILE_NAME).read_bytes())
    with pytest.raises(ValueError, match="other weights"):
        load(other, visual_kv_basis=other / FILE_NAME)
    with pytest.raises(FileNotFoundError, match="visual_kv_basis"):
        load(other, visual_kv_basis=other / "nowhere")
    # Left beside new weights, it stops nobody.
    stale = load(other)
    with pytest.raises(InvalidRequest, match="triptych compress"):
        stale.engine.submit(about(stale, 1, VisualKvPolicy.LOW_RANK))
    with pytest.raises(ValueError, match="visual_kv_ratio"):
        load(folder, visual_kv_ratio=3)
    (other / FILE_NAME).write_bytes((folder / FILE_NAME).read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        load(other, visual_kv_basis=other / FILE_NAME)


def test_the_first_token_comes_from_exact_kv_under_every_policy(folder: Path) -> None:
    exact = load(folder, prefix_cache=False)
    expected = run(exact.engine, [about(exact, 1, VisualKvPolicy.EXACT)])[0]
    answer = run(exact.engine, [about(exact, 1, VisualKvPolicy.LOW_RANK)])[0]
    assert reported(answer) == (VisualKvPolicy.LOW_RANK, True)
    assert answer.tokens[0] == expected.tokens[0], "the first token comes from the prompt's own step"


# Merging


def test_similar_tokens_are_merged_and_others_left_alone() -> None:
    dice = torch.Generator().manual_seed(0)
    distinct = torch.randn(2, 3, 6, 2, 8, generator=dice)
    places = torch.tensor([0, 0, 1, 2, 2, 3, 3, 3, 4, 5, 5, 5])
    keys, values, counts = merge_tokens(distinct[0][:, places], distinct[1][:, places], 6)
    for layer in range(3):
        assert torch.allclose(keys[layer], distinct[0][layer], atol=1e-5)
        assert torch.allclose(values[layer], distinct[1][layer], atol=1e-5)
        assert torch.equal(counts[layer], torch.bincount(places).float())


@pytest.mark.parametrize("target", [1, 3, 7, 16])
def test_merging_keeps_the_weighted_mean_and_reaches_any_target(target: int) -> None:
    keys, values = torch.randn(2, 2, 16, 2, 8, generator=torch.Generator().manual_seed(1))
    merged_keys, merged_values, counts = merge_tokens(keys, values, target)
    assert counts.shape == (2, target)
    for merged, original in ((merged_keys, keys), (merged_values, values)):
        assert torch.allclose((merged * counts[..., None, None]).sum(1), original.sum(1), atol=1e-4)
