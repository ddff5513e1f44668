"""Questions about a scene, in users' wordings, each with the one answer that is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from numpy.random import Generator

from triptych.demo.drawing import COLOURS, FORMS, GRID, Scene, Shape

Kind = Literal["what", "where", "colour", "count", "exists", "describe", "follow_up", "no_image"]

KINDS: Final[tuple[Kind, ...]] = ("what", "where", "colour", "count", "exists", "describe", "follow_up", "no_image")
"""Every kind a dialogue can have; "follow_up" has two turns, of which the second leans on the first."""

PLACES: Final = (
    "top left",
    "top middle",
    "top right",
    "middle left",
    "middle",
    "middle right",
    "bottom left",
    "bottom middle",
    "bottom right",
)
"""The model's word for each cell; questions may also use those in `_OTHER_PLACES`."""

NUMBERS: Final = ("zero", "one", "two", "three", "four")

NO_IMAGE_ANSWER: Final = "I see no picture"
"""The answer to every question asked without a picture."""

SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer questions about the picture.",
    "Answer briefly.",
)
"""System prompts met in training, so that a client which always sends one does no harm."""

_OTHER_PLACES: Final[dict[int, tuple[str, ...]]] = {
    1: ("top centre", "top center"),
    3: ("centre left", "center left"),
    4: ("centre", "center"),
    5: ("centre right", "center right"),
    7: ("bottom centre", "bottom center"),
}

_KIND_SHARES: Final[dict[Kind, float]] = {
    "what": 0.2,
    "where": 0.17,
    "colour": 0.15,
    "count": 0.17,
    "exists": 0.13,
    "describe": 0.06,
    "follow_up": 0.12,
}

_SINGULAR: Final[dict[str, tuple[str, ...]]] = {
    "where": ("where is the {x}?", "where is the {x}?", "in which place is the {x}?", "where can you see the {x}?"),
    "colour": (
        "what {colour} is the {x}?",
        "what {colour} is the {x}?",
        "which {colour} is the {x}?",
        "what is the {colour} of the {x}?",
        "what {colour} does the {x} have?",
    ),
    "exists": (
        "is there {a} {x}?",
        "is there {a} {x}?",
        "is there {a} {x} in the picture?",
        "can you see {a} {x}?",
        "do you see {a} {x}?",
        "does the image show {a} {x}?",
    ),
}
_WHAT: Final = (
    "what is in the {place}?",
    "what is in the {place}?",
    "what do you see in the {place}?",
    "what is at the {place}?",
    "which shape is in the {place}?",
    "what shape is in the {place}?",
    "what can you see in the {place} of the picture?",
)
_COUNT: Final = (
    "how many {xs} are there?",
    "how many {xs} are there?",
    "how many {xs} are in the picture?",
    "how many {xs} are in the image?",
    "how many {xs} do you see?",
    "how many {xs} can you see?",
    "count the {xs}.",
)
_DESCRIBE: Final = (
    "describe the picture.",
    "describe the image.",
    "describe this image.",
    "what do you see?",
    "what is in the picture?",
    "what is in this image?",
    "what does the image show?",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its only right answer.

    Attributes:
        kind: What is asked.
        question: In a user's words.
        answer: Exactly as the model should say it.
        cell: The grid cell that the answer names, where the question tells only the shape in it.
    """

    kind: Kind
    question: str
    answer: str
    cell: int | None = None


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Turns about one picture, in order; `kind` is that of the last turn."""

    kind: Kind
    turns: tuple[Turn, ...]


def shape_name(shape: Shape) -> str:
    """How the model names a shape: "a red circle", "an orange star"."""
    return f"{_article(shape.colour)} {shape.colour} {shape.form}"


def dialogue(scene: Scene, rng: Generator, kind: Kind | None = None) -> Dialogue:
    """A dialogue about `scene`, of the given kind or of one drawn by the usual shares.

    A kind that has no unambiguous question here (say "colour" with two equal shapes only) becomes "what".
    """
    if kind is None:
        kind = list(_KIND_SHARES)[int(rng.choice(len(_KIND_SHARES), p=list(_KIND_SHARES.values())))]
    turns = _turns(scene, rng, kind)
    return Dialogue(turns[-1].kind, tuple(replace(turn, question=_reword(turn.question, rng)) for turn in turns))


def without_image(rng: Generator, asked: Dialogue) -> Dialogue:
    """The first question of `asked`, put without its picture."""
    question = asked.turns[0].question
    if rng.random() < 0.1:
        question = _reword(str(rng.choice(("hello", "hi", "who are you?", "help"))), rng)
    return Dialogue("no_image", (Turn("no_image", question, NO_IMAGE_ANSWER),))


def _turns(scene: Scene, rng: Generator, kind: Kind) -> tuple[Turn, ...]:
    if kind == "what":
        return (_what(scene, rng),)
    if kind == "where":
        return (_where(scene, rng) or _what(scene, rng),)
    if kind == "colour":
        return (_colour(scene, rng) or _what(scene, rng),)
    if kind == "count":
        return (_count(scene, rng),)
    if kind == "exists":
        return (_exists(scene, rng),)
    if kind == "describe":
        return (_describe(scene, rng),)
    if kind == "no_image":
        return without_image(rng, dialogue(scene, rng)).turns
    return _follow_up(scene, rng)


def _what(scene: Scene, rng: Generator) -> Turn:
    cell = int(rng.integers(GRID * GRID))
    if rng.random() < 0.7:
        cell = _any(scene.shapes, rng).cell
    return Turn("what", _pick(_WHAT, rng).format(place=_place(cell, rng)), _content(scene, cell))


def _where(scene: Scene, rng: Generator) -> Turn | None:
    found = _unique_name(scene, rng, names_colour=True)
    if found is None:
        return None
    shape, name = found
    return Turn("where", _pick(_SINGULAR["where"], rng).format(x=name), PLACES[shape.cell], shape.cell)


def _colour(scene: Scene, rng: Generator) -> Turn | None:
    if rng.random() < 0.2:
        shape = _any(scene.shapes, rng)
        name = f"shape in the {_place(shape.cell, rng)}"
    else:
        found = _unique_name(scene, rng, names_colour=False)
        if found is None:
            return None
        shape, name = found
    return Turn("colour", _pick(_SINGULAR["colour"], rng).format(x=name, colour=_spelling(rng)), shape.colour)


def _count(scene: Scene, rng: Generator) -> Turn:
    colour, form = _category(scene, rng, shown=0.7)
    if rng.random() < 0.25:
        colour, form = None, None
    total = sum(_matches(shape, colour, form) for shape in scene.shapes)
    words = " ".join(word for word in (colour, f"{form or 'shape'}s") if word)
    return Turn("count", _pick(_COUNT, rng).format(xs=words), NUMBERS[total])


def _exists(scene: Scene, rng: Generator) -> Turn:
    if rng.random() < 0.15:
        cell = _any(scene.shapes, rng).cell if rng.random() < 0.4 else int(rng.integers(GRID * GRID))
        question = _pick(("is there a shape in the {p}?", "is there something in the {p}?"), rng)
        return Turn("exists", question.format(p=_place(cell, rng)), _yes_or_no(_at(scene, cell) is not None))
    colour, form = _category(scene, rng, shown=0.2)
    words = " ".join(word for word in (colour, form or "shape") if word)
    question = _pick(_SINGULAR["exists"], rng).format(a=_article(words), x=words)
    return Turn("exists", question, _yes_or_no(any(_matches(shape, colour, form) for shape in scene.shapes)))


def _describe(scene: Scene, rng: Generator) -> Turn:
    parts = [f"{shape_name(shape)} in the {PLACES[shape.cell]}" for shape in scene.shapes]
    return Turn("describe", _pick(_DESCRIBE, rng), ", ".join(parts))


def _follow_up(scene: Scene, rng: Generator) -> tuple[Turn, ...]:
    first = (_where, _colour, _what, _exists)[int(rng.integers(4))](scene, rng) or _what(scene, rng)
    shape = _meant(scene, first)
    if shape is None:
        shapes = len(scene.shapes)
        question = _pick(("how many shapes are there?", "and how many shapes are there?"), rng)
        return first, Turn("follow_up", question, NUMBERS[shapes])
    asks: list[tuple[str, str, int | None]] = []
    if first.kind != "where" and first.kind != "what":
        asks.append((_pick(("where is it?", "and where is it?", "where?"), rng), PLACES[shape.cell], shape.cell))
    if first.kind != "colour":
        colour = _spelling(rng)
        wording = _pick(("what {c} is it?", "and what {c} is it?", "which {c} is it?", "what {c} does it have?"), rng)
        asks.append((wording.format(c=colour), shape.colour, None))
    asks.append((_pick(("what is it?", "what shape is it?", "and what shape is it?"), rng), shape_name(shape), None))
    question, answer, cell = asks[int(rng.integers(len(asks)))]
    return first, Turn("follow_up", question, answer, cell)


def _meant(scene: Scene, turn: Turn) -> Shape | None:
    """The one shape a first turn is about, if there is exactly one."""
    if turn.answer in ("nothing", "no"):
        return None
    words = turn.question.rstrip("?.").replace("centre", "middle").replace("center", "middle").split()
    colour = next((word for word in words if word in COLOURS), None)
    form = next((word for word in words if word in FORMS), None)
    fitting = [shape for shape in scene.shapes if _matches(shape, colour, form)]
    if colour is None and form is None:
        place = " ".join(word for word in words if word in ("top", "middle", "bottom", "left", "right"))
        fitting = [shape for shape in scene.shapes if PLACES[shape.cell] == place]
    return fitting[0] if len(fitting) == 1 else None


def _unique_name(scene: Scene, rng: Generator, *, names_colour: bool) -> tuple[Shape, str] | None:
    """A shape with words that fit it alone, which say its colour only if they may."""
    names: list[tuple[Shape, str]] = []
    for shape in scene.shapes:
        wordings: list[tuple[str | None, str | None]] = [(None, shape.form)]
        if names_colour:
            wordings += [(shape.colour, shape.form), (shape.colour, None)]
        for colour, form in wordings:
            if sum(_matches(other, colour, form) for other in scene.shapes) == 1:
                names.append((shape, " ".join(word for word in (colour, form or "shape") if word)))
    return names[int(rng.integers(len(names)))] if names else None


def _category(scene: Scene, rng: Generator, shown: float) -> tuple[str | None, str | None]:
    """A colour, a form or both to ask for: those of a shape in the scene with probability `shown`, else any."""
    if rng.random() < shown:
        shape = _any(scene.shapes, rng)
        colour, form = shape.colour, shape.form
    else:
        colour, form = _pick(COLOURS, rng), _pick(FORMS, rng)
        if rng.random() < 0.4:
            colour = _any(scene.shapes, rng).colour
    part = rng.random()
    return (colour if part < 0.7 else None), (form if part > 0.3 else None)


def _matches(shape: Shape, colour: str | None, form: str | None) -> bool:
    return colour in (None, shape.colour) and form in (None, shape.form)


def _at(scene: Scene, cell: int) -> Shape | None:
    return next((shape for shape in scene.shapes if shape.cell == cell), None)


def _content(scene: Scene, cell: int) -> str:
    shape = _at(scene, cell)
    return "nothing" if shape is None else shape_name(shape)


def _place(cell: int, rng: Generator) -> str:
    return _pick(_OTHER_PLACES[cell], rng) if cell in _OTHER_PLACES and rng.random() < 0.25 else PLACES[cell]


def _reword(question: str, rng: Generator) -> str:
    if rng.random() < 0.4:
        question = question[0].upper() + question[1:]
    return question.rstrip("?.") if rng.random() < 0.25 else question


def _any(shapes: Sequence[Shape], rng: Generator) -> Shape:
    return shapes[int(rng.integers(len(shapes)))]


def _pick(choices: Sequence[str], rng: Generator) -> str:
    return choices[int(rng.integers(len(choices)))]


def _article(words: str) -> str:
    return "an" if words[0] in "aeiou" else "a"


def _spelling(rng: Generator) -> str:
    return "colour" if rng.random() < 0.5 else "color"


def _yes_or_no(truth: bool) -> str:
    return "yes" if truth else "no"
