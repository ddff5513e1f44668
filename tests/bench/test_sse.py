"""Events are the same however the bytes are cut."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from triptych.bench.targets.sse import SseParser

STREAM = b': comment\n\ndata: {"a": 1}\n\nevent: x\r\nid: 7\r\ndata:two\r\ndata: lines\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@given(st.lists(st.integers(min_value=0, max_value=len(STREAM)), max_size=20))
def test_events_do_not_depend_on_where_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = SseParser()
    found = [data for start, end in pairwise(edges) for data in parser.feed(STREAM[start:end])]
    assert found == EVENTS


def test_an_event_that_has_not_ended_is_not_given_out() -> None:
    parser = SseParser()
    assert parser.feed(b"data: half\n") == []
    assert parser.feed(b"\n") == [b"half"]
