"""What is measured of every engine when the model sees pictures. To add a trial, name it in PICTURE_TRIALS."""

from pathlib import Path

from triptych.bench.goodput import Slo
from triptych.bench.peers.results import Results
from triptych.bench.peers.table import SECTION
from triptych.bench.peers.trials import TRIALS, Bar, Trial, output_rate
from triptych.bench.report import RoundReport
from triptych.bench.scenarios import Shape
from triptych.stack import takes_no_pictures

MIXED_LIMITS = {"text": Slo(ttft_s=2.0, tpot_s=0.25), "image": Slo(ttft_s=15.0, tpot_s=0.25)}
"""What a good answer keeps in mixed traffic; wide enough for a ViT-L on two cores."""

MIXED_RATES = {"mixed-light": (0.5, 1.0), "mixed": (1.0, 1.5), "mixed-heavy": (2.0, 1.5)}
"""Requests a second, and the ratio wanted. With a ViT-L two cores can just do the first and not the second; where they
multiply bfloat16, the second and not the third."""


def first_token(round_: RoundReport) -> float | None:
    """Median time to first token, in seconds."""
    return round_.figures.ttft_s.p50 if round_.figures.ttft_s else None


def times_sooner_again(round_: RoundReport) -> float | None:
    """Time to first token of the first question about a picture over that of the later ones, medians."""
    first, again = (round_.by_label[label].ttft_s for label in ("first", "again"))
    return first.p50 / again.p50 if first and again else None


def good_answers(round_: RoundReport) -> float:
    """Answers a second that keep MIXED_LIMITS."""
    good = 0
    for request in round_.requests:
        limits = MIXED_LIMITS[request.label]
        in_time = request.ttft_s is not None and request.ttft_s <= limits.ttft_s
        good += not request.error and in_time and (request.tpot_s or 0) <= limits.tpot_s
    return good / round_.figures.duration_s


PICTURE_TRIALS = (
    Trial(
        "image-1", "one picture, time to first token", "s", "one-image", Shape(32, 1), 1, 2, first_token, Bar(1.0),
        better="lower",
    ),
    Trial("images-8", "8 pictures at once, 64 tokens each", "tokens/s", "one-image", Shape(32, 64), 8, 8, output_rate,
        Bar(1.2),
    ),
    Trial(
        "image-again", "the same picture again, times sooner", "times", "repeated-image", Shape(32, 1), 1, 4,
        times_sooner_again, Bar(0.0, least=10.0),
    ),
    *(
        Trial(
            name, f"mixed traffic, {rate:g} requests/s, good answers", "answers/s", "mixed", Shape(64, 32),
            1, 36, good_answers, Bar(ratio), rate=rate,
        )
        for name, (rate, ratio) in MIXED_RATES.items()
    ),
)  # fmt: skip


ALL_TRIALS = (*TRIALS, *PICTURE_TRIALS)


def trials_for(model_dir: Path) -> tuple[Trial, ...]:
    """Returns the trials of a checkpoint: of pictures if it takes them, else of text."""
    return TRIALS if takes_no_pictures(model_dir) else PICTURE_TRIALS


def section_of(results: Results) -> str:
    """Returns the name of a document's place in a Markdown file: text has one, each model for pictures its own."""
    pictures = {trial.name for trial in PICTURE_TRIALS}
    seen = any(sample.trial in pictures for sample in results.samples)
    return f"{SECTION}-{results.model}" if seen else SECTION
