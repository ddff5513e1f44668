"""The engine over its tiers: answers are those of a cold run, whatever was evicted, reloaded, lost or restarted."""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.worker.checkpoints import Reference
from tests.worker.driving import Answer, ask, drain, identity_of, load, run
from triptych.errors import FeaturesRequired
from triptych.worker.engine.request import GenerationRequest
from triptych.worker.engine.sequence import Phase
from triptych.worker.engine.sequence import Sequence as Sequence_
from triptych.worker.kv.fetching import Fetcher
from triptych.worker.kv.hierarchy import Hierarchy
from triptych.worker.kv.identity import BlockIdentity
from triptych.worker.kv.tiers.disk import DiskTier
from triptych.worker.kv.tiers.tier import BlockBytes
from triptych.worker.loading import LoadedModel

TEXT = "what color is the big round thing on the left side of the picture"

Start = Callable[..., LoadedModel]


@pytest.fixture
def start(tiny_dir: Path, tmp_path: Path) -> Iterator[Start]:
    models: list[LoadedModel] = []

    def begin(disk: bool = False, by_cost: bool = False, **settings: Any) -> LoadedModel:
        where = {"kv_disk_dir": tmp_path / "kv"} if disk else {}
        models.append(load(tiny_dir, **{"kv_blocks": 24, "kv_host_bytes": 1 << 20, **where, **settings}))
        hierarchy = models[-1].engine.reuse.hierarchy
        if hierarchy is not None and not by_cost:
            # So small a model computes about as fast as it loads: what the measured cost says is chance.
            hierarchy.cost.pays = lambda tier: True  # type: ignore[method-assign]
        return models[-1]

    yield begin
    for model in models:
        stop(model)


def stop(model: LoadedModel) -> None:
    if model.engine.reuse.hierarchy is not None:
        settle(model)
    model.engine.check_integrity()
    model.engine.close()


def tiers(model: LoadedModel) -> Hierarchy:
    hierarchy = model.engine.reuse.hierarchy
    assert hierarchy is not None
    return hierarchy


def moved(model: LoadedModel, way: str) -> int:
    return sum(count for (taken, _), count in tiers(model).moves().items() if taken == way)


def settle(model: LoadedModel) -> None:
    """Waits until all that was computed is safe below."""
    assert tiers(model).flush()


def shown(reference: Reference, seed: int, count: int = 16) -> tuple[object, int, Tensor]:
    """Returns a picture; of `count` tokens, for the decoder does not mind."""
    rows = reference.features(reference.picture(seed))
    return (seed, count), count, rows.repeat(-(-count // len(rows)), 1)[:count]


def bare(picture: tuple[object, int, Tensor]) -> tuple[object, int, None]:
    return picture[0], picture[1], None


def question(model: LoadedModel, *parts: Any, text: str = TEXT, tokens: int = 6) -> GenerationRequest:
    return ask(model, *parts, text, max_tokens=tokens, ignore_eos=True)


def one(model: LoadedModel, request: GenerationRequest) -> Answer:
    answer = run(model.engine, [request])[0]
    assert answer.error is None
    return answer


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_dialogues_that_the_device_cannot_hold_together_are_reused_and_answered_as_cold(
    start: Start, tiny_reference: Reference, policy: str
) -> None:
    cold = start(prefix_cache=False, kv_blocks=64)
    warm = start(disk=True, kv_write_policy=policy, kv_blocks=16, kv_prefetch_timeout_s=60)
    pictures = [shown(tiny_reference, seed, 40) for seed in range(8)]
    expected = [one(cold, question(cold, picture)).tokens for picture in pictures]
    for visit in range(3):
        for picture, tokens in zip(pictures, expected, strict=True):
            answer = one(warm, question(warm, picture))
            assert answer.tokens == tokens
            assert (answer.cached_tokens > 0) == (visit > 0)
            warm.engine.check_integrity()
            settle(warm)


def test_a_restart_finds_its_kv_on_disk_and_needs_no_features(start: Start, tiny_reference: Reference) -> None:
    picture = shown(tiny_reference, 1, 40)
    before = start(disk=True)
    expected = one(before, question(before, picture))
    stop(before)
    after = start(disk=True)
    answer = one(after, question(after, bare(picture)))
    assert answer.tokens == expected.tokens
    assert answer.cached_tokens >= 40
    stop(after)
    other = start(disk=True, kernels="torch")  # What computes otherwise computes other numbers.
    assert one(other, question(other, picture)).cached_tokens == 0


@pytest.mark.parametrize("count", [1, 5, 16, 25, 40])
@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_another_first_question_about_a_picture_of_any_size_needs_no_encoder(
    start: Start, tiny_reference: Reference, count: int, where: str
) -> None:
    pictures = [shown(tiny_reference, seed, count) for seed in (1, 2)]
    model = start(disk=True, kv_text_share=0.0, kv_visual_share=0.0)
    first = question(model, pictures[0], "a", pictures[1], text="is it red")
    one(model, first)
    settle(model)
    if where == "host":
        for name in range(4):  # Pushes it off the device.
            one(model, question(model, text=f"{name} {TEXT}", tokens=40))
        assert moved(model, "host_to_device") == 0
    elif where == "disk":
        stop(model)
        model = start(disk=True)
    second = question(model, bare(pictures[0]), "a", bare(pictures[1]), text="how many are there")
    coverage = model.engine.coverage(second.prompt, "")
    assert coverage.images == (True, True)
    assert coverage.cached_tokens == second.prompt.spans[1].end
    answer = one(model, second)
    assert answer.cached_tokens == coverage.cached_tokens
    cold = start(prefix_cache=False, kv_blocks=64)
    full = question(cold, pictures[0], "a", pictures[1], text="how many are there")
    assert answer.tokens == one(cold, full).tokens
    assert (moved(model, "host_to_device") > 0) == (where != "device")


def test_a_picture_whose_kv_is_lost_on_the_way_up_asks_for_features_before_any_text(
    start: Start, tiny_reference: Reference, tmp_path: Path
) -> None:
    picture = shown(tiny_reference, 1, 40)
    model = start(disk=True)
    expected = one(model, question(model, picture)).tokens
    stop(model)
    model = start(disk=True)
    for path in (tmp_path / "kv" / "triptych-kv").glob("*.kv"):
        os.truncate(path, 3000)
    sequence, _ = model.engine.submit(question(model, bare(picture)))
    answer = drain(model.engine, [sequence])[0]
    assert isinstance(answer.error, FeaturesRequired)
    assert not answer.tokens
    assert one(model, question(model, picture)).tokens == expected


def test_a_pool_that_holds_a_dialogue_and_a_half_takes_its_picture_without_features(
    start: Start, tiny_reference: Reference
) -> None:
    picture = shown(tiny_reference, 1, 160)
    model = start(kv_blocks=24)
    expected = one(model, question(model, picture)).tokens
    answer = one(model, question(model, bare(picture)))  # What it pins is most of what it needs.
    assert answer.tokens == expected
    assert answer.cached_tokens >= 160


class Slow(DiskTier):
    """A disk that takes its time."""

    delay_s = 0.0

    def get(self, identities: Sequence[BlockIdentity], outs: Sequence[BlockBytes]) -> int:
        time.sleep(self.delay_s)
        return super().get(identities, outs)


def test_what_does_not_come_in_time_is_computed_and_delays_nobody_else(
    start: Start, tiny_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = shown(tiny_reference, 1, 40)
    model = start(disk=True)
    expected = one(model, question(model, picture)).tokens
    stop(model)
    monkeypatch.setattr("triptych.worker.kv.building.DiskTier", Slow)
    monkeypatch.setattr(Slow, "delay_s", 9.0)
    model = start(disk=True, kv_prefetch_timeout_s=2.5)
    slow, _ = model.engine.submit(question(model, picture, tokens=40))
    quick, _ = model.engine.submit(question(model, text="hello", tokens=3))
    started_s = time.monotonic()
    while not quick.output_tokens:
        model.engine.step()
    assert slow.phase is Phase.WAITING
    while slow.output_tokens == 0:
        model.engine.step()
    assert 2.5 <= time.monotonic() - started_s < 8.0
    answers = drain(model.engine, [slow, quick])
    assert answers[0].tokens[:6] == expected
    assert slow.cached_tokens == 0


def test_a_cancelled_request_lets_go_of_kv_that_is_still_on_its_way(
    start: Start, tiny_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = shown(tiny_reference, 1, 40)
    model = start(disk=True)
    one(model, question(model, picture))
    stop(model)
    monkeypatch.setattr("triptych.worker.kv.building.DiskTier", Slow)
    monkeypatch.setattr(Slow, "delay_s", 0.3)
    model = start(disk=True)
    sequence, _ = model.engine.submit(question(model, bare(picture)))
    model.engine.step()
    model.engine.cancel(sequence)
    assert not model.engine.has_work
    model.engine.check_integrity()
    time.sleep(0.5)
    settle(model)
    assert tiers(model).host.leases == 0


def test_who_is_preempted_is_brought_back_instead_of_computed_again_when_that_is_cheaper(start: Start) -> None:
    def answers(model: LoadedModel) -> tuple[list[list[int]], int]:
        crowd = [question(model, text=f"{n} {TEXT}", tokens=90) for n in range(4)]
        sequences = [model.engine.submit(request)[0] for request in crowd]
        tokens = [answer.tokens for answer in drain(model.engine, sequences, check_each_step=True)]
        again = sum(chunk.tokens for one in sequences for chunk in one.timeline.chunks)
        return tokens, again - sum(len(request.prompt.token_ids) for request in crowd)

    roomy, swap, recompute = start(kv_blocks=100), start(kv_blocks=20), start(kv_blocks=20)
    tiers(recompute).cost.pays = lambda tier: False  # type: ignore[method-assign]
    tiers(swap).cost.pays = lambda tier: True  # type: ignore[method-assign]
    expected, none = answers(roomy)
    assert none == 0
    swapped, few = answers(swap)
    computed, many = answers(recompute)
    assert swapped == computed == expected
    assert 0 < few < many / 2
    assert moved(swap, "host_to_device") > 0 == moved(recompute, "host_to_device")


def test_the_cost_model_prefers_what_was_faster_and_tries_again_now_and_then() -> None:
    from triptych.worker.kv.cost import CostModel

    cost = CostModel()
    assert cost.pays("disk")
    cost.note_load("disk", 4, 4.0)
    assert cost.pays("disk")
    cost.note_prefill(160, 1.0)  # A block's tokens in a tenth of a second, against one second.
    assert [cost.pays("disk") for _ in range(32)].count(True) == 2
    assert cost.pays("host")
    cost.note_prefill(16, 100.0)
    assert cost.pays("disk")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_requests_restarts_and_damage_gives_the_answers_of_a_cold_engine(
    start: Start, tiny_reference: Reference, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    quiet = start(prefix_cache=False, kv_blocks=64)
    pictures = [shown(tiny_reference, n, count) for n, count in enumerate((16, 21, 40))]
    asked = [((), TEXT[:40]), ((0,), TEXT[:33]), ((1,), TEXT[:50]), ((1,), "hm"), ((2, 0), TEXT[:20]), ((), "a")]
    expected = [
        one(quiet, question(quiet, *(pictures[n] for n in names), text=text, tokens=50)).tokens for names, text in asked
    ]
    live: dict[Sequence_, int] = {}
    ended = reused = 0
    model = start(disk=True, kv_blocks=14, kv_host_bytes=72 * 16384)
    for turn in range(250):
        if dice.random() < 0.3:
            number = dice.randrange(len(asked))
            names, text = asked[number]
            hide = dice.random() < 0.5
            parts = [bare(pictures[n]) if hide else pictures[n] for n in names]
            try:
                sequence, _ = model.engine.submit(question(model, *parts, text=text, tokens=50))
                live[sequence] = number
            except FeaturesRequired:
                assert hide
        if live and dice.random() < 0.05:
            model.engine.cancel(gone := dice.choice(list(live)))
            del live[gone]
        if dice.random() < 0.1:
            files = sorted((tmp_path / "kv" / "triptych-kv").glob("*.kv"))
            for path in dice.sample(files, min(2, len(files))):
                path.unlink() if dice.random() < 0.5 else os.truncate(path, 3000)
        if turn % 80 == 79:
            for sequence in live:
                model.engine.cancel(sequence)
            live.clear()
            reused += cached_tokens(model)
            stop(model)
            policy = dice.choice(("write_through", "write_back"))
            model = start(disk=True, kv_blocks=14, kv_host_bytes=72 * 16384, kv_write_policy=policy)
        failed = {sequence for sequence, event in model.engine.step() if hasattr(event, "error")}
        model.engine.check_integrity()
        for sequence in failed:
            hidden = any(features is None for features in sequence.request.features)
            assert hidden and not sequence.output_tokens
            live.pop(sequence, None)
        for sequence in [one for one in live if one.phase is Phase.ENDED]:
            number = live.pop(sequence)
            assert sequence.token_ids[len(sequence.request.prompt.token_ids) :] == expected[number]
            ended += 1
    assert ended >= 3
    assert reused + cached_tokens(model) > 0


def cached_tokens(model: LoadedModel) -> int:
    return sum(use.cached for use in model.engine.reuse.meter.tokens.values())


def test_pictures_and_text_do_not_push_each_other_out_of_their_shares(start: Start, tiny_reference: Reference) -> None:
    model = start(kv_blocks=40, kv_host_bytes=0)
    one(model, question(model, shown(tiny_reference, 1, 128), text="a", tokens=2))
    for name in range(12):
        one(model, question(model, text=f"{name} {TEXT}", tokens=20))
    asked = question(model, shown(tiny_reference, 1, 128), text="b", tokens=2)
    assert model.engine.coverage(asked.prompt, "").cached_tokens >= 128
    one(model, question(model, text=TEXT, tokens=20))
    for seed in range(2, 8):
        one(model, question(model, shown(tiny_reference, seed, 128), text="a", tokens=2))
    assert model.engine.coverage(question(model, text=TEXT).prompt, "").cached_tokens >= 48


def test_neither_pictures_nor_text_can_take_the_whole_device_from_the_other(
    start: Start, tiny_reference: Reference
) -> None:
    model = start(kv_blocks=40, kv_host_bytes=0, kv_reserve_share=0.2)
    for seed in range(4):
        model.engine.submit(question(model, shown(tiny_reference, seed, 192), text="a", tokens=60))
    model.engine.step()
    short, _ = model.engine.submit(question(model, text="hello", tokens=4))
    for _ in range(6):
        model.engine.step()
    assert short.output_tokens == 4
    drain(model.engine, [])


def test_identities_of_tenants_differ_in_every_tier(start: Start, tiny_reference: Reference) -> None:
    picture = shown(tiny_reference, 1, 40)
    model = start(disk=True)
    one(model, question(model, picture))
    settle(model)
    stranger = ask(model, bare(picture), TEXT, cache_salt="other tenant")
    assert model.engine.coverage(stranger.prompt, "other tenant").cached_tokens == 0
    with pytest.raises(FeaturesRequired):
        model.engine.submit(stranger)
    assert identity_of(picture[0]) in {image for images in tiers(model).image_bytes() for image in [images]}


def test_a_fetcher_reads_nothing_that_takes_longer_than_computing(start: Start, tiny_reference: Reference) -> None:
    picture = shown(tiny_reference, 1, 40)
    model = start(disk=True)
    expected = one(model, question(model, picture)).tokens
    stop(model)
    model = start(disk=True, by_cost=True)
    tiers(model).cost.note_load("disk", 1, 100.0)
    tiers(model).cost.note_prefill(1000, 0.001)
    assert isinstance(tiers(model)._fetcher, Fetcher)
    answer = one(model, question(model, picture))
    assert answer.cached_tokens == 0
    assert answer.tokens == expected
