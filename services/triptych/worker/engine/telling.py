"""From the tokens a sequence took to the events that tell of them: text, and how it ended."""

from dataclasses import dataclass

from triptych.worker.detokenizer import TokenDecoder
from triptych.worker.engine.events import Completed, Event, Text, Usage
from triptych.worker.engine.logprobs import TokenLogprobs, spell, within
from triptych.worker.engine.request import FinishReason
from triptych.worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Taken:
    """A token that a sequence took and has not told of.

    Attributes:
        token: Its id.
        previous: The token before it.
        logprobs: How likely it was, if the request asks.
        reason: Why the sequence ends with it, as far as its id and number say; its text may have a stop string.
    """

    token: int
    previous: int
    logprobs: TokenLogprobs | None
    reason: FinishReason | None


def tell(sequence: Sequence, taken: Taken, decoder: TokenDecoder) -> list[Event]:
    """Adds a token to its sequence's text. Returns the events this brings, a last one if the sequence ends here."""
    reason, text = taken.reason, ""
    choices = sequence.unsent_choices
    sequence.unsent_tokens += 1
    if reason is not FinishReason.END:
        if taken.logprobs is not None:
            choices.append(spell(taken.logprobs, taken.previous, decoder))
        piece = sequence.text.push(taken.token)
        text = piece.text
        reason = FinishReason.STOP if piece.stopped else reason
    if reason in (FinishReason.END, FinishReason.LENGTH):
        piece = sequence.text.finish()
        text += piece.text
        reason = FinishReason.STOP if piece.stopped else reason
    events: list[Event] = []
    if text:
        sent = within(choices, text) if reason is FinishReason.STOP else tuple(choices)
        events.append(Text(text, sequence.unsent_tokens, sent))
        sequence.unsent_tokens = 0
        choices.clear()
    if reason is not None:
        usage = _usage(sequence)
        events.append(Completed(reason, usage, sequence.timeline, sequence.visual_kv, sequence.saved_bytes))
    return events


def _usage(sequence: Sequence) -> Usage:
    prompt = sequence.request.prompt
    visual = prompt.visual_tokens
    return Usage(len(prompt.token_ids) - visual, visual, sequence.cached_tokens, sequence.output_tokens)
