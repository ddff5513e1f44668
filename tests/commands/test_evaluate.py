"""What `triptych evaluate` makes of its measurements; tests/stack asks the real model."""

from triptych.commands.evaluate_drafts import draft_lines
from triptych.commands.evaluate_tokens import reduction_lines
from triptych.commands.ways import STAGES, Measured


def measured(right: int, **milliseconds: float) -> Measured:
    way = Measured(visual_tokens=64, right=right, asked=10)
    for stage in STAGES:
        way.seconds[stage] = [milliseconds.get(stage, 0.0) / 1e3] * 10
    return way


def test_a_reduction_that_costs_more_time_than_it_saves_is_told_so() -> None:
    lines = reduction_lines(
        10,
        {
            "none": measured(10, encode=8, prefill=5),
            "kmeans:32": measured(9, encode=10, reduce=2, prefill=4),
            "merge:16": measured(8, encode=9, reduce=1, prefill=2),
        },
    )
    text = "\n".join(lines)
    assert "| kmeans:32 | 64 | 90.0 % (9/10) | 8.0 | 2.0 | 4.0 |" in text
    assert "kmeans:32 costs more time than it saves: 2.0 ms against 1.0 ms of prefill." in text
    assert "merge:16 saves more time than it costs: 1.0 ms against 3.0 ms of prefill." in text


def test_a_draft_that_loses_is_told_so_and_every_outcome_is_counted() -> None:
    loses, wins = measured(9, time_to_first_token=30), measured(10, time_to_first_token=20)
    loses.outcomes.update(kept=6, rejected=3, unneeded=1)
    loses.similarities = [0.9, 0.96, 0.98]
    text = "\n".join(draft_lines(10, {"none": measured(10, time_to_first_token=25), "a": loses, "b": wins}))
    assert "| a | 60 %, 3 rejected, 1 unneeded | 90.0 % (9/10) |" in text
    assert "median 0.960, lowest 0.900, highest 0.980" in text
    assert "a loses: 30.0 ms to the first token, 25.0 ms without a draft." in text
    assert "b wins: 20.0 ms" in text
