"""The newest spans on this machine's disk, for `triptych trace` where no Jaeger runs.

`telemetry.span_keeper` fills it. One SQLite file below the user's cache folder, private
to the user and bounded: the oldest spans go first. It holds names, times, ids and counts; never a prompt, a picture, a
key, or an attribute that is not known to be harmless.
"""

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Self

from triptych.telemetry.span_store import Span

log = logging.getLogger(__name__)

MAX_SPANS = 50_000
"""About 4,000 requests and 20 MB."""

SAFE_ATTRIBUTES = (
    "triptych.", "gen_ai.usage.", "gen_ai.operation.", "gen_ai.request.model", "gen_ai.response.model",
    "gen_ai.response.finish_reasons", "gen_ai.response.id", "gen_ai.provider.", "error.type", "http.request.method",
    "http.response.status_code", "http.route", "rpc.", "triton.model_name", "triton.model_version",
)  # fmt: skip
"""What attributes that are kept begin with."""

MAX_VALUE_CHARS = 256

_SCHEMA = """
CREATE TABLE IF NOT EXISTS spans (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    trace_id TEXT NOT NULL,
    request_id TEXT,
    span TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_trace ON spans (trace_id);
CREATE INDEX IF NOT EXISTS by_request ON spans (request_id) WHERE request_id IS NOT NULL;
"""
_PRUNE_EVERY = 1000


def default_path() -> Path:
    """Returns where spans are kept: `triptych/spans.sqlite3` in XDG_CACHE_HOME, else in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "triptych" / "spans.sqlite3"


class SpanLog:
    """A bounded store of spans on disk. Thread-safe; several processes may write to and read from one file."""

    def __init__(self, path: Path | None = None, max_spans: int = MAX_SPANS) -> None:
        """Opens or makes the file, readable for its owner only. Raises OSError when it cannot."""
        path = path or default_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        path.chmod(0o600)
        self._max_spans = max_spans
        self._lock = threading.Lock()
        self._since_prune = 0
        try:
            self._database = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = OFF")  # A crash of the machine may cost the newest spans.
            self._database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise OSError(f"{path} is not a span store ({error}); remove it") from None

    def add(self, spans: Iterable[Span]) -> None:
        """Writes spans; the oldest go when there are too many. A failing disk costs spans, never a request."""
        rows = [(span.trace_id, span.attributes.get("triptych.request_id"), to_json(span)) for span in spans]
        try:
            with self._lock, self._database:
                self._database.executemany("INSERT INTO spans (trace_id, request_id, span) VALUES (?, ?, ?)", rows)
                self._since_prune += len(rows)
                if self._since_prune >= _PRUNE_EVERY:
                    self._prune()
        except sqlite3.Error as error:
            log.warning("%d spans are lost: %s", len(rows), error)

    def trace(self, name: str) -> list[Span]:
        """Returns the spans of a trace, by its id or by the id of a request in it, by start time; empty if unknown.

        Where one request id was used several times, the newest counts.
        """
        newest = "SELECT trace_id FROM spans WHERE request_id = ? ORDER BY number DESC LIMIT 1"
        query = f"SELECT span FROM spans WHERE trace_id = ? OR trace_id = ({newest})"
        with self._lock, closing(self._database.execute(query, (name.lower(), name))) as found:
            return sorted((from_json(text) for (text,) in found), key=lambda span: span.start_ns)

    def newest(self) -> str | None:
        """Returns the id of the trace whose request was written last; None when there is none."""
        query = "SELECT trace_id FROM spans WHERE request_id IS NOT NULL ORDER BY number DESC LIMIT 1"
        with self._lock, closing(self._database.execute(query)) as found:
            row = found.fetchone()
        return str(row[0]) if row else None

    def count(self) -> int:
        """Returns how many spans are kept."""
        with self._lock, closing(self._database.execute("SELECT COUNT(*) FROM spans")) as found:
            return int(found.fetchone()[0])

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._prune()
            self._database.commit()
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prune(self) -> None:
        self._since_prune = 0
        self._database.execute(
            "DELETE FROM spans WHERE number <= (SELECT MAX(number) FROM spans) - ?", (self._max_spans,)
        )


def to_json(span: Span) -> str:
    """Returns a span as it is written: only attributes that are known to be harmless, cut to MAX_VALUE_CHARS."""
    attributes = {
        key: value[:MAX_VALUE_CHARS] for key, value in span.attributes.items() if key.startswith(SAFE_ATTRIBUTES)
    }
    return json.dumps(
        [span.name, span.service, span.trace_id, span.span_id, span.parent_id, span.start_ns, span.end_ns, attributes]
    )


def from_json(text: str) -> Span:
    """Returns a span that `to_json` wrote."""
    return Span(*json.loads(text))
