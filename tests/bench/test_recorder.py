"""Latencies follow from the recorded times as documented."""

import pytest

from triptych.bench.recorder import Record, Recorder
from triptych.bench.report import Figures, figures_of, ratios, summarise


def finished(sent_s: float, pieces_s: list[float], ended_s: float, tokens: int, error: str = "") -> Record:
    return Record("text", 0, sent_s, sent_s, pieces_s, ended_s, tokens, counted=True, error=error)


def test_latencies_of_a_known_request() -> None:
    record = finished(1.0, [1.5, 1.6, 1.8], 1.9, 5)
    assert record.ttft_s == pytest.approx(0.5)
    assert record.itl_s == pytest.approx([0.1, 0.2])
    assert record.tpot_s == pytest.approx(0.1)  # 0.4 s for the four tokens after the first
    assert record.latency_s == pytest.approx(0.9)


def test_an_answer_without_text_has_no_first_token() -> None:
    record = finished(0.0, [], 1.0, 3)
    assert record.ttft_s is None and record.tpot_s is None and record.itl_s == []


def test_a_single_token_has_no_time_per_further_token() -> None:
    assert finished(0.0, [0.5], 0.6, 1).tpot_s is None


def test_tokens_are_the_servers_count_or_else_the_pieces() -> None:
    times = iter([0.1, 0.2, 0.3])
    recorder = Recorder(Record("text", 0, 0.0, 0.0), lambda: next(times))
    recorder.piece(2)
    recorder.piece(1)
    recorder.end()
    assert recorder.record.output_tokens == 3 and not recorder.record.counted
    times = iter([0.1, 0.2])
    recorder = Recorder(Record("text", 0, 0.0, 0.0), lambda: next(times))
    recorder.piece(1)
    recorder.usage(9, 4)
    recorder.end()
    assert recorder.record.output_tokens == 4 and recorder.record.prompt_tokens == 9 and recorder.record.counted


def test_failed_requests_are_counted_and_their_times_are_not() -> None:
    records = [finished(0.0, [1.0, 2.0], 2.0, 2), finished(0.0, [9.0], 9.0, 1, error="HTTP 503")]
    figures = figures_of(records, 4.0)
    assert figures.requests == 2 and figures.errors == {"HTTP 503": 1}
    assert figures.requests_per_s == 0.25 and figures.output_tokens_per_s == 0.5
    assert figures.ttft_s is not None and figures.ttft_s.max == 1.0


def test_rounds_are_summarised_by_median_and_range_and_compared_round_by_round() -> None:
    def rounds(*first_tokens_s: float) -> list[Figures]:
        return [figures_of([finished(0.0, [first_s, first_s + 1], first_s + 1, 2)], 1.0) for first_s in first_tokens_s]

    mine, theirs = rounds(1.0, 2.0, 3.0), rounds(2.0, 4.0, 1.0)
    summary = summarise(mine)
    assert summary.ttft_p50_s is not None
    assert (summary.ttft_p50_s.median, summary.ttft_p50_s.low, summary.ttft_p50_s.high) == (2.0, 1.0, 3.0)
    ratio = ratios(mine, theirs)["ttft_p50_s"]
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.5, 3.0)
