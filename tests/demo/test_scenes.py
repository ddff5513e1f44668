"""The demo's scenes and dialogues: deterministic, right, varied, and held out for real."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from triptych.demo import ANSWER, PICTURE, QUESTION
from triptych.demo.dialogues import NO_IMAGE_ANSWER, NUMBERS, PLACES, dialogue, without_image
from triptych.demo.drawing import COLOURS, FORMS, Scene, Shape
from triptych.demo.picture import SCENE, SIZE
from triptych.demo.scenes import KINDS, NATIVE_SIZE, Example, draw, held_out, held_out_rng, training_rng


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return held_out(600)


def test_the_held_out_set_is_the_same_every_time(examples: list[Example]) -> None:
    for again, first in zip(held_out(20), examples, strict=False):
        assert again.scene == first.scene
        assert again.dialogue == first.dialogue
        assert again.image.tobytes() == first.image.tobytes()


def test_a_longer_held_out_set_begins_with_the_shorter_one(examples: list[Example]) -> None:
    assert [each.dialogue for each in held_out(5)] == [each.dialogue for each in examples[:5]]


def test_held_out_streams_differ_from_every_training_stream() -> None:
    training = {training_rng(seed, index).bytes(16) for seed in range(4) for index in range(500)}
    assert training.isdisjoint(held_out_rng(index).bytes(16) for index in range(500))


def test_held_out_dialogues_have_every_kind_but_the_one_without_image(examples: list[Example]) -> None:
    assert {each.dialogue.kind for each in examples} == set(KINDS) - {"no_image"}


def test_pictures_have_the_size_asked_for_whatever_it_is(examples: list[Example]) -> None:
    for size in (56, 84, 112, 224, 448):
        assert draw(examples[0].scene, size).size == (size, size)
    assert examples[0].image.size == (NATIVE_SIZE, NATIVE_SIZE)


def test_a_scene_drawn_large_and_scaled_down_looks_like_one_drawn_small(examples: list[Example]) -> None:
    for example in examples[:50]:
        scene = Scene(example.scene.shapes, example.scene.top, example.scene.bottom, noise=0.0, noise_seed=0)
        small = np.asarray(draw(scene, 112), dtype=float)
        scaled = np.asarray(draw(scene, 448).resize((112, 112), Image.Resampling.BICUBIC), dtype=float)
        assert np.abs(small - scaled).mean() < 4


def test_a_shape_is_painted_in_its_shade_inside_its_cell(examples: list[Example]) -> None:
    for example in examples[:100]:
        picture = draw(Scene(example.scene.shapes, example.scene.top, example.scene.bottom, 0.0, 0), 300)
        for shape in example.scene.shapes:
            row, column = divmod(shape.cell, 3)
            assert column <= shape.x * 3 < column + 1
            assert row <= shape.y * 3 < row + 1
            assert picture.getpixel((round(shape.x * 300), round(shape.y * 300))) == shape.rgb


def test_every_answer_is_what_an_independent_reader_of_the_scene_says(examples: list[Example]) -> None:
    for example in examples:
        meant: list[Shape] = []
        for turn in example.dialogue.turns:
            answer, meant = _read(turn.question, example.scene, meant)
            assert turn.answer == answer, (turn, example.scene)


def test_a_question_without_its_picture_is_answered_by_saying_so(examples: list[Example]) -> None:
    for index, example in enumerate(examples[:50]):
        assert without_image(held_out_rng(index), example.dialogue).turns[0].answer == NO_IMAGE_ANSWER


def test_a_kind_asked_for_is_the_kind_given_wherever_the_scene_allows_it(examples: list[Example]) -> None:
    for kind in KINDS:
        kinds = {dialogue(example.scene, held_out_rng(0), kind).kind for example in examples[:40]}
        assert kind in kinds
        assert kinds <= {kind, "what"}


def test_the_bundled_picture_is_the_scene_it_claims_to_be() -> None:
    with Image.open(PICTURE) as picture:
        assert picture.tobytes() == draw(SCENE, SIZE).tobytes()
    assert _read(QUESTION, SCENE, []) == (ANSWER, list(SCENE.shapes))


def _read(question: str, scene: Scene, before: list[Shape]) -> tuple[str, list[Shape]]:
    """The answer by plain pattern matching on the question's words, and the shapes the question is about."""
    text = re.sub(r"[?.]", "", question.lower())
    text = re.sub(r"\bcent(re|er)\b", "middle", text)
    place = re.search(r"(?:in|at) the ((?:top|middle|bottom)(?: (?:left|middle|right))?)", text)
    colour = next((word for word in COLOURS if re.search(rf"\b{word}\b", text)), None)
    form = next((word for word in FORMS if re.search(rf"\b{word}s?\b", text)), None)
    about = [
        shape
        for shape in scene.shapes
        if (place is None or PLACES[shape.cell] == place.group(1))
        and (colour is None or shape.colour == colour)
        and (form is None or shape.form == form)
    ]
    if re.search(r"\bit\b", text) or text == "where":
        about = before
    if text.startswith(("how many", "and how many", "count")):
        return NUMBERS[len(about)], about
    if text.startswith(("is there", "can you see", "do you see", "does the image show")):
        return ("yes" if about else "no"), about
    if text.startswith("describe") or re.fullmatch(
        r"what do you see|what is in (the|this) (picture|image)|what does the image show", text
    ):
        return ", ".join(f"{_named(shape)} in the {PLACES[shape.cell]}" for shape in scene.shapes), about
    if re.search(r"colou?r", text):
        return _only(about).colour, about
    if "where" in text or "which place" in text:
        return PLACES[_only(about).cell], about
    return (_named(_only(about)) if about else "nothing"), about


def _only(shapes: list[Shape]) -> Shape:
    assert len(shapes) == 1, shapes
    return shapes[0]


def _named(shape: Shape) -> str:
    return f"{'an' if shape.colour == 'orange' else 'a'} {shape.colour} {shape.form}"
