"""The official openai package against the whole stack: what its users rely on, whatever the model says."""

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.stack.conftest import Up, load_of, noise_png, wait_idle
from triptych.demo import ANSWER, PICTURE, QUESTION
from triptych.telemetry.span_store import SpanReceiver
from triptych.telemetry.span_tree import roots_of

pytestmark = pytest.mark.integration

Messages = Any


@pytest.fixture
def client(served: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def aclient(served: Up) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def ask(*content: str | bytes, **image: str) -> Messages:
    """Returns one user message: strings are text, bytes pictures."""
    parts = [
        {"type": "text", "text": item}
        if isinstance(item, str)
        else {"type": "image_url", "image_url": {"url": data_url(item), **image}}
        for item in content
    ]
    return [{"role": "user", "content": parts}]


def report_of(reply: ChatCompletion | ChatCompletionChunk) -> dict[str, Any]:
    """Returns Triptych's own part."""
    report: dict[str, Any] = (reply.model_extra or {})["triptych"]
    return report


def test_the_served_model_is_listed_and_described(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["demo"]
    assert client.models.retrieve("demo").object == "model"
    assert (models[0].model_extra or {})["triptych"]["context_tokens"] > 0


def test_a_picture_and_a_question_give_an_answer_with_usage_and_timings(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="demo", messages=ask(PICTURE.read_bytes(), QUESTION), temperature=0, max_tokens=8
    )
    choice = reply.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens + reply.usage.completion_tokens == reply.usage.total_tokens
    report = report_of(reply)
    assert report["usage"]["visual_tokens"] == report["images"][0]["visual_tokens"] > 0
    assert {"intake", "queue", "prefill", "decode", "total"} <= set(report["timings"])
    assert report["degradations"] == [] and len(report["trace_id"]) == 32


def test_a_stream_says_what_the_whole_reply_says(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": "demo",
        "messages": ask(noise_png(31_001), QUESTION),
        "temperature": 0,
        "max_completion_tokens": 12,
        "extra_body": {"triptych": {"ignore_eos": True}},
    }
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1
    assert report_of(chunks[-2])["images"][0]["source"] in ("kv_cache", "encoder_cache")


async def test_the_async_client_streams_many_pictures_at_once(aclient: openai.AsyncOpenAI, served: Up) -> None:
    async def one(number: int) -> int:
        stream = await aclient.chat.completions.create(
            model="demo",
            messages=ask(noise_png(32_000 + number, 64), "what is it?"),
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"triptych": {"ignore_eos": True}},
        )
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
        assert usage is not None
        return usage.completion_tokens

    assert await asyncio.gather(*(one(number) for number in range(24))) == [6] * 24
    await wait_idle(served.worker)


@pytest.mark.parametrize(("detail", "share"), [("high", 1.0), ("auto", 1.0), ("low", 0.5)])
def test_detail_chooses_how_closely_to_look(client: openai.OpenAI, detail: str, share: float) -> None:
    reply = client.chat.completions.create(
        model="demo", messages=ask(PICTURE.read_bytes(), QUESTION, detail=detail), max_tokens=2
    )
    model: dict[str, Any] = (client.models.retrieve("demo").model_extra or {})["triptych"]
    assert report_of(reply)["images"][0]["encoded_side"] == model["native_image_side"] * share


def test_a_dialogue_with_a_system_message_and_an_earlier_answer_goes_on(client: openai.OpenAI) -> None:
    messages: Messages = [
        {"role": "developer", "content": "be brief"},
        *ask(PICTURE.read_bytes(), QUESTION),
        {"role": "assistant", "content": "left"},
        {"role": "user", "content": "what colour is it?"},
    ]
    reply = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=4)
    assert reply.choices[0].message.content  # A sampled answer may be nothing but its end.


def test_a_seed_repeats_every_choice_and_choices_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        reply = client.chat.completions.create(
            model="demo",
            messages=ask("is there a circle?"),
            temperature=2,
            max_tokens=24,
            n=3,
            seed=seed,
            extra_body={"triptych": {"ignore_eos": True}},
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        return [choice.message.content for choice in reply.choices]

    first = texts(-7)
    assert first == texts(-7)
    assert len(set(first)) > 1


def test_several_choices_stream_side_by_side(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="demo", messages=ask("is there a circle?"), n=3, max_tokens=5, stream=True
    )
    ended = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ended) == [0, 1, 2]


def test_logprobs_belong_to_the_tokens_of_the_text_and_greedy_takes_the_likeliest(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="demo",
        messages=ask("is there a circle?"),
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
        extra_body={"triptych": {"ignore_eos": True}},
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    text = reply.choices[0].message.content
    assert text
    if "\N{REPLACEMENT CHARACTER}" not in text:  # An untrained model may say bytes that are no characters.
        # A token list names special tokens; the text leaves them out.
        assert "".join(token.token for token in logprobs.content).replace("<|end|>", "") == text
    for token in logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob
        assert token.top_logprobs == sorted(token.top_logprobs, key=lambda top: -top.logprob)


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "demo", "messages": ask("is there a circle?"), "temperature": 0}
    extra = {"triptych": {"ignore_eos": True}}
    text = client.chat.completions.create(**arguments, max_tokens=12, extra_body=extra).choices[0].message.content
    assert text and len(text) > 4
    stop = text[2:4]
    stopped = client.chat.completions.create(**arguments, max_tokens=12, stop=[stop, "\0"], extra_body=extra)
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_completions_continue_a_text_as_it_is(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="demo", prompt=["is there", "what is"], max_tokens=4, logprobs=2, seed=1)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert all(choice.logprobs and choice.logprobs.tokens for choice in reply.choices)
    chat = client.chat.completions.create(model="demo", messages=ask("is there"), max_tokens=4)
    assert reply.usage is not None and chat.usage is not None
    assert reply.usage.prompt_tokens < 2 * chat.usage.prompt_tokens  # No chat template around them.
    chunks = list(client.completions.create(model="demo", prompt="is there", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_errors_are_the_packages_own_exceptions(client: openai.OpenAI) -> None:
    hello = ask("hello")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=hello)
    assert missing.value.code == "model_not_found" and "demo" in missing.value.message
    with pytest.raises(openai.BadRequestError) as corrupt:
        client.chat.completions.create(model="demo", messages=ask(noise_png(1)[:-200], "what is it?"))
    assert corrupt.value.code == "image_corrupt"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="demo", messages=hello, max_tokens=1_000_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as early:  # A stream that cannot begin is no stream.
        client.chat.completions.create(model="demo", messages=ask(b"hello", "what is it?"), stream=True)
    assert early.value.code == "image_unsupported"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="demo", messages=hello, extra_body={"min_p": 0.1})
    assert unknown.value.param == "min_p"


# Eight long answers take several seconds; a single one is over before a test on a busy machine has left it.
LONG: dict[str, Any] = {
    "messages": ask("is there a circle?"),
    "max_tokens": 1800,
    "n": 8,
    "extra_body": {"triptych": {"ignore_eos": True}},
}


def test_leaving_a_stream_frees_the_worker_at_once(client: openai.OpenAI, served: Up) -> None:
    stream = client.chat.completions.create(model="demo", **LONG, stream=True)
    assert next(iter(stream)).choices
    assert asyncio.run(load_of(served.worker)).running
    stream.close()
    assert asyncio.run(wait_idle(served.worker, timeout_s=2)).used_blocks == 0


def test_a_client_that_gives_up_before_the_reply_frees_the_worker(client: openai.OpenAI, served: Up) -> None:
    hurried = client.with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        hurried.chat.completions.create(model="demo", **LONG)
    assert asyncio.run(wait_idle(served.worker, timeout_s=2)).used_blocks == 0


def test_several_threads_share_a_client(client: openai.OpenAI) -> None:
    answers: list[str | None] = []

    def one() -> None:
        reply = client.chat.completions.create(
            model="demo", messages=ask("is there a circle?"), temperature=0, max_tokens=4
        )
        answers.append(reply.choices[0].message.content)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8


async def test_the_trace_begins_at_the_gateway(aclient: openai.AsyncOpenAI, receiver: SpanReceiver) -> None:
    reply = await aclient.chat.completions.create(
        model="demo", messages=ask(noise_png(33_000, 64), "what is it?"), max_tokens=3
    )
    trace_id = report_of(reply)["trace_id"]
    async with asyncio.timeout(30):
        while not {"gateway", "router", "triton", "worker"} <= {s.service for s in receiver.store.trace(trace_id)}:
            await asyncio.sleep(0.2)
    spans = receiver.store.trace(trace_id)
    assert [(root.name, root.service) for root in roots_of(spans)] == [("gateway.request", "gateway")]
    root = roots_of(spans)[0]
    assert next(span for span in spans if span.name == "router.generate").parent_id == root.span_id
    assert root.attributes["http.route"] == "/v1/chat/completions"
    assert root.attributes["http.response.status_code"] == "200"


@pytest.mark.trained
def test_the_bundled_picture_is_answered_right(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="demo", messages=ask(PICTURE.read_bytes(), QUESTION), temperature=0)
    assert reply.choices[0].message.content == ANSWER
