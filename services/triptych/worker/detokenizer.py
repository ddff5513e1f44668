"""Tokens to text while they arrive: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, so at most three replacement characters can stand for one that is unfinished.
_MOST_UNFINISHED = 3
# Window length, in tokens, from which the decoded past is dropped.
_WINDOW_TOKENS = 16
_LONGEST_WINDOW_TOKENS = 64
# After this many tokens without a character, what was decoded before is no longer waited for.
_GIVE_UP_TOKENS = 8


class TokenDecoder(Protocol):
    """What is needed of a tokenizer; `tokenizers.Tokenizer` has it."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of whole token sequences."""


class Detokenizer:
    """Decodes a growing token sequence piece by piece; the pieces together are the decoding of the whole.

    Only a window of recent tokens is decoded each time. It begins where text was complete once, and keeps some tokens
    that are already sent, because some tokenizers drop the space in front of the first token they see.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._sent = ""  # What was sent of the window's text.
        self._complete = 0  # Leading tokens of the window that were complete text when last seen.
        self._anchor = 0  # The same, one time earlier.

    def push(self, token: int) -> str:
        """Adds a token and returns the characters that are now complete; may be empty."""
        self._window.append(token)
        text = self._decode(self._window)
        ready = _without_unfinished(text)
        if not ready.startswith(self._sent):
            # Byte-fallback tokenizers show a whole run of bytes as unreadable until its last character is complete.
            if len(self._window) - self._complete < _GIVE_UP_TOKENS:
                return ""
            del self._window[: self._complete]
            self._complete = self._anchor = 0
            self._sent = ""
            text = self._decode(self._window)
            ready = _without_unfinished(text)
        new = ready[len(self._sent) :]
        self._sent = ready
        if ready == text:
            self._anchor, self._complete = self._complete, len(self._window)
        self._shorten()
        return new

    def finish(self) -> str:
        """Returns complete characters held back so far; an unfinished or unreadable end is dropped."""
        text = self._decode(self._window).rstrip(_REPLACEMENT)
        return text[len(self._sent) :] if text.startswith(self._sent) else ""

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)

    def _shorten(self) -> None:
        """Drops tokens that are sent; where nothing readable comes any more, also some that may not be complete."""
        drop = self._anchor if len(self._window) >= _WINDOW_TOKENS else 0
        if not drop and len(self._window) >= _LONGEST_WINDOW_TOKENS:
            drop = len(self._window) - _GIVE_UP_TOKENS
        if drop:
            del self._window[:drop]
            self._complete = max(0, self._complete - drop)
            self._anchor = 0
            self._sent = _without_unfinished(self._decode(self._window))


def _without_unfinished(text: str) -> str:
    """Cuts off the replacement characters at the end that more bytes may still turn into a character."""
    readable = len(text.rstrip(_REPLACEMENT))
    return text[: max(readable, len(text) - _MOST_UNFINISHED)]


class StopFilter:
    """Lets text through up to the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Adds text; returns what may be sent, and whether a stop string was found."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def finish(self) -> str:
        """Returns what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that begins `stop` but is not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What a token added.

    Attributes:
        text: Text that may be sent; may be empty.
        stopped: Whether a stop string was found; nothing follows then.
    """

    text: str
    stopped: bool = False


class TextStream:
    """One answer's text: a detokenizer and a stop filter in a row."""

    def __init__(self, decoder: TokenDecoder, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._filter = StopFilter(stops)

    def push(self, token: int) -> TextPiece:
        """Adds a token."""
        return TextPiece(*self._filter.push(self._detokenizer.push(token)))

    def finish(self) -> TextPiece:
        """Ends the answer and returns what was held back."""
        text, stopped = self._filter.push(self._detokenizer.finish())
        return TextPiece(text, True) if stopped else TextPiece(text + self._filter.finish())
