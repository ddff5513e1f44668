"""Spans on disk: found again, bounded, private, and without anything that was said."""

import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.telemetry import span_log
from triptych.telemetry.span_log import SpanLog, default_path, from_json, to_json
from triptych.telemetry.span_store import Span


def span(name: str, trace: str = "aa", request: str = "", start_ns: int = 0, **attributes: str) -> Span:
    if request:
        attributes["triptych.request_id"] = request
    return Span(name, "router", trace, f"id-{name}", "", start_ns, start_ns + 10, attributes)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_request_is_found_by_its_trace_and_by_its_own_id_after_a_restart() -> None:
    with SpanLog() as log:
        log.add([span("late", request="r1", start_ns=5), span("early"), span("other", trace="bb", request="r2")])
    with SpanLog() as log:
        for name in ("aa", "AA", "r1"):
            assert [found.name for found in log.trace(name)] == ["early", "late"]
        assert log.newest() == "bb"
        assert log.trace("unknown") == []


def test_the_newest_use_of_a_request_id_counts() -> None:
    with SpanLog() as log:
        log.add([span("first", trace="aa", request="same"), span("second", trace="bb", request="same")])
        assert [found.name for found in log.trace("same")] == ["second"]


def test_an_empty_store_knows_nothing() -> None:
    with SpanLog() as log:
        assert log.newest() is None and log.trace("") == []


def test_the_oldest_spans_go_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_log, "_PRUNE_EVERY", 10)
    with SpanLog(max_spans=50) as log:
        for number in range(40):
            log.add(span(f"{number}-{index}", trace=f"{number:032x}", request=f"r{number}") for index in range(5))
            assert log.count() <= 60
        assert len(log.trace("r39")) == 5
        assert log.trace("r0") == []


def test_the_file_stays_small(cache: Path) -> None:
    with SpanLog(max_spans=2000) as log:
        for number in range(200):
            log.add(span(f"{number}-{index}", trace=f"{number:032x}") for index in range(100))
    size = sum(path.stat().st_size for path in (cache / "triptych").iterdir())
    assert size < 2000 * 1000


def test_only_the_owner_can_read_it(cache: Path) -> None:
    with SpanLog() as log:
        log.add([span("a")])
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (cache / "triptych").iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE((cache / "triptych").stat().st_mode) == 0o700


def test_attributes_that_may_hold_what_was_said_are_not_written(cache: Path) -> None:
    secret = "xylophone"
    attributes = {
        "gen_ai.input.messages": secret, "gen_ai.prompt": secret, "exception.message": secret, "url.full": secret,
        "http.request.header.authorization": secret, "triptych.visual_tokens": "64",
    }  # fmt: skip
    with SpanLog() as log:
        log.add([replace(span("a"), attributes=attributes), span("b", request=secret[:1] * 9999)])
        (kept, cut) = log.trace("aa")
    assert kept.attributes == {"triptych.visual_tokens": "64"}
    assert len(cut.attributes["triptych.request_id"]) == span_log.MAX_VALUE_CHARS
    assert secret.encode() not in b"".join(path.read_bytes() for path in (cache / "triptych").iterdir())


@given(
    st.text(), st.integers(min_value=0, max_value=2**63), st.dictionaries(st.just("triptych.x"), st.text(max_size=9))
)
def test_a_span_survives_the_disk(name: str, start_ns: int, attributes: dict[str, str]) -> None:
    original = Span(name, "worker", "ab", "cd", "ef", start_ns, start_ns + 1, attributes)
    assert from_json(to_json(original)) == original


def test_two_processes_may_share_the_file() -> None:
    with SpanLog() as one, SpanLog() as other:
        one.add([span("a", request="r")])
        other.add([span("b")])
        assert len(one.trace("r")) == len(other.trace("r")) == 2


def test_a_file_that_is_no_store_is_named(cache: Path) -> None:
    path = default_path()
    path.parent.mkdir()
    path.write_bytes(b"something else entirely, and long enough to be read" * 99)
    with pytest.raises(OSError, match="remove it"):
        SpanLog()


def test_a_failing_disk_costs_spans_and_nothing_else() -> None:
    log = SpanLog()
    log._database.execute("DROP TABLE spans")
    log.add([span("a")])
    with pytest.raises(sqlite3.Error):
        log.count()
    log._database.close()
