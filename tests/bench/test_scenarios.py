"""Scenarios: the same for the same seed, and shaped as their names say."""

import io

import pytest
from PIL import Image

from triptych.bench.benchmark import derive_seed
from triptych.bench.scenarios import BURST, SCENARIOS, TEXTS_PER_BURST, TURNS, Shape, make_arrivals
from triptych.bench.workload import Arrival, Conversation, count_conversations
from triptych.commands.bench import SCENARIO_NAMES

SHAPE = Shape(prompt_tokens=9, output_tokens=4, picture_side=48)


def conversations(arrivals: list[Arrival]) -> list[Conversation]:
    return [conversation for arrival in arrivals for conversation in arrival]


def pictures(arrivals: list[Arrival]) -> list[bytes]:
    return [picture for one in conversations(arrivals) for turn in one.turns for picture in turn.pictures]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_fixes_everything_and_another_seed_changes_everything(name: str) -> None:
    first, again, other = (make_arrivals(name, SHAPE, 13, seed) for seed in (1, 1, 2))
    assert first == again
    assert not set(pictures(first)) & set(pictures(other))
    assert not {one.turns[0].text for one in conversations(first)} & {one.turns[0].text for one in conversations(other)}


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("count", [0, 1, 13])
def test_as_many_conversations_arrive_as_asked(name: str, count: int) -> None:
    assert count_conversations(make_arrivals(name, SHAPE, count, 0)) == count


@pytest.mark.parametrize(("name", "each"), [("text", 0), ("one-image", 1), ("four-images", 4)])
def test_requests_have_as_many_pictures_as_the_name_says_and_none_twice(name: str, each: int) -> None:
    arrivals = make_arrivals(name, SHAPE, 5, 0)
    assert {len(one.turns[0].pictures) for one in conversations(arrivals)} == {each}
    assert len(set(pictures(arrivals))) == 5 * each


def test_a_repeated_image_has_one_picture_and_many_questions() -> None:
    arrivals = make_arrivals("repeated-image", SHAPE, 5, 0)
    assert len(set(pictures(arrivals))) == 1
    assert len({one.turns[0].text for one in conversations(arrivals)}) == 5
    assert [one.label for one in conversations(arrivals)] == ["first", "again", "again", "again", "again"]


def test_a_dialogue_shows_its_picture_first_and_then_only_talks() -> None:
    (conversation,) = conversations(make_arrivals("multi-turn", SHAPE, 1, 0))
    assert [len(turn.pictures) for turn in conversation.turns] == [1] + [0] * (TURNS - 1)


def test_mixed_traffic_has_bursts_of_images_between_texts() -> None:
    sizes = [len(arrival) for arrival in make_arrivals("mixed", SHAPE, 2 * (TEXTS_PER_BURST + BURST), 0)]
    assert sizes == ([1] * TEXTS_PER_BURST + [BURST]) * 2


def test_prompts_and_pictures_have_the_size_asked_for() -> None:
    (conversation,) = conversations(make_arrivals("one-image", SHAPE, 1, 0))
    (turn,) = conversation.turns
    assert len(turn.text.split()) == 9
    image = Image.open(io.BytesIO(turn.pictures[0]))
    assert image.size == (48, 48) and image.format == "JPEG"


def test_seeds_of_rounds_differ_and_are_the_same_everywhere() -> None:
    assert derive_seed(0, "text", 0) != derive_seed(0, "text", 1) != derive_seed(1, "text", 1)
    assert derive_seed(0, "text", 0) == 2563636126


def test_the_command_line_names_every_scenario() -> None:
    assert set(SCENARIO_NAMES) == set(SCENARIOS)
