"""Log-probabilities of tokens: the model's own, as many as asked for, and nothing of a stop string."""

import math
from collections.abc import Sequence

import torch

from tests.worker.serving import Client, request, text_of
from triptych.errors import InvalidRequest
from triptych.v1 import generation_pb2
from triptych.worker.engine.logprobs import TokenChoice, TokenLogprobs, measure, spell, within
from triptych.worker.engine.request import SamplingOptions
from triptych.worker.engine.sampler import TokenChooser

VOCABULARY = 12


def chooser(**options: float) -> TokenChooser:
    return TokenChooser(SamplingOptions(**options), (1,), VOCABULARY, torch.device("cpu"))  # type: ignore[arg-type]


class Letters:
    """A tokenizer whose token n is the n-th letter, with a space in front unless it comes first."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(chr(ord("a") + token) for token in ids)


def test_they_are_the_models_own_whatever_sampling_does_to_the_logits() -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    choosers = [chooser(top_logprobs=0), chooser(), chooser(top_logprobs=4, temperature=9.0, top_k=1)]
    plain, nothing, four = measure(logits, [5, 6, 7], choosers)
    expected = logits.log_softmax(-1)
    assert plain is not None and plain.top == ()
    assert plain.chosen[0] == 5 and math.isclose(plain.chosen[1], float(expected[0, 5]), rel_tol=1e-6)
    assert nothing is None
    assert four is not None
    assert [token for token, _ in four.top] == expected[2].argsort(descending=True)[:4].tolist()
    assert all(math.isclose(value, float(expected[2, token]), rel_tol=1e-6) for token, value in four.top)


def test_a_tokens_text_is_what_it_adds_after_the_one_before() -> None:
    spelled = spell(TokenLogprobs((2, -0.5), ((2, -0.5), (0, -1.0))), previous=1, decoder=Letters())
    assert spelled == TokenChoice((" c", -0.5), ((" c", -0.5), (" a", -1.0)))


def test_tokens_that_a_stop_string_cut_off_are_not_told() -> None:
    choices = [TokenChoice((text, -1.0), ()) for text in ("one", " two", " st", "op")]
    assert within(choices, "one two") == tuple(choices[:2])
    assert within(choices, "one tw") == tuple(choices[:1])
    assert within(choices, "") == ()


async def test_every_chunk_bears_the_tokens_it_accounts_for(client: Client) -> None:
    events = await client.answer(request(sampling=generation_pb2.SamplingParameters(top_logprobs=2)))
    chunks = [event.chunk for event in events if event.HasField("chunk")]
    assert chunks
    assert all(len(chunk.tokens) == chunk.token_count for chunk in chunks)
    assert all(choice.chosen == choice.top[0] for chunk in chunks for choice in chunk.tokens)  # Greedy.
    plain = await client.answer(request())
    assert text_of(plain) == text_of(events)
    assert not any(event.chunk.tokens for event in plain)


async def test_asking_for_too_many_is_refused(client: Client) -> None:
    error = await client.refusal(request(sampling=generation_pb2.SamplingParameters(top_logprobs=21)))
    assert isinstance(error, InvalidRequest) and "top_logprobs" in error.message
