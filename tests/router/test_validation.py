import math
from typing import Any

import pytest

from tests.router.fakes import ask
from triptych.config import RouterSettings
from triptych.errors import InvalidRequest
from triptych.router.validation import validate
from triptych.v1 import generation_pb2, inference_pb2

USER, ASSISTANT = inference_pb2.ROLE_USER, inference_pb2.ROLE_ASSISTANT
NAN = math.nan


def failure(request: inference_pb2.GenerateRequest, **knobs: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        validate(request, RouterSettings(**knobs))
    return caught.value


def turn(role: int, *texts: str) -> inference_pb2.Message:
    return inference_pb2.Message(
        role=inference_pb2.Role.ValueType(role), parts=[inference_pb2.Part(text=text) for text in texts]
    )


def test_a_dialogue_within_all_limits_passes() -> None:
    request = ask(b"x", "hi", request_id="a.b:c-D_9", cache_salt="s" * 256)
    request.messages.insert(0, turn(ASSISTANT, "earlier"))
    request.messages.insert(0, turn(inference_pb2.ROLE_SYSTEM, "be brief"))
    request.sampling.CopyFrom(
        generation_pb2.SamplingParameters(temperature=100, top_k=5, top_p=1, repetition_penalty=10, seed=0)
    )
    request.stopping.CopyFrom(generation_pb2.StoppingParameters(max_tokens=1, stop=["x" * 256] * 16))
    validate(request, RouterSettings())


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [turn(USER)],
        [turn(inference_pb2.ROLE_UNSPECIFIED, "x")],
        [turn(17, "x")],
        [turn(USER, "x"), turn(ASSISTANT, "y")],
        [inference_pb2.Message(role=USER, parts=[inference_pb2.Part()])],
        [inference_pb2.Message(role=USER, parts=[inference_pb2.Part(image=inference_pb2.Image())])],
    ],
)
def test_malformed_messages_are_refused(messages: list[inference_pb2.Message]) -> None:
    assert failure(inference_pb2.GenerateRequest(messages=messages)).reason == "MESSAGES_INVALID"


def test_one_image_above_the_limit_is_refused_naming_the_limit() -> None:
    validate(ask(b"x", b"x"), RouterSettings(max_images=2))
    error = failure(ask(b"x", b"x", b"x"), max_images=2)
    assert error.reason == "TOO_MANY_IMAGES"
    assert "max_images=2" in error.message


def test_too_much_text_is_refused_naming_the_limit() -> None:
    error = failure(ask("x" * 6, "x" * 5), max_text_chars=10)
    assert error.reason == "TEXT_TOO_LONG"
    assert "max_text_chars=10" in error.message


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": NAN},
        {"temperature": -0.1},
        {"temperature": 101},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": NAN},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": NAN},
        {"repetition_penalty": 10.5},
    ],
)
def test_sampling_outside_its_range_is_refused(sampling: dict[str, Any]) -> None:
    error = failure(ask("x", sampling=generation_pb2.SamplingParameters(**sampling)))
    assert error.reason == "SAMPLING_INVALID"
    assert next(iter(sampling)) in error.message


@pytest.mark.parametrize("stopping", [{"max_tokens": -1}, {"stop": ["x"] * 17}, {"stop": [""]}, {"stop": ["x" * 257]}])
def test_stopping_outside_its_range_is_refused(stopping: dict[str, Any]) -> None:
    assert failure(ask("x", stopping=generation_pb2.StoppingParameters(**stopping))).reason == "STOPPING_INVALID"


@pytest.mark.parametrize("request_id", ["a b", "ä", "x" * 129, "a\n", "a/b"])
def test_a_request_id_of_other_characters_is_refused(request_id: str) -> None:
    assert failure(ask("x", request_id=request_id)).reason == "REQUEST_ID_INVALID"


def test_a_long_salt_is_refused_by_its_bytes() -> None:
    assert failure(ask("x", cache_salt="ä" * 129)).reason == "CACHE_SALT_INVALID"


@pytest.mark.parametrize("field", ["priority", "degradation_policy"])
def test_enum_values_from_the_future_are_refused(field: str) -> None:
    assert failure(ask("x", **{field: 99})).reason == "ENUM_INVALID"
    request = ask(b"x")
    request.messages[0].parts[0].image.detail = 99  # type: ignore[assignment]
    assert failure(request).reason == "ENUM_INVALID"


def test_a_raw_prompt_is_one_message_without_images() -> None:
    validate(ask("hi", raw_prompt=True), RouterSettings())
    assert failure(ask(b"x", "hi", raw_prompt=True)).reason == "MESSAGES_INVALID"
    two = ask("hi", raw_prompt=True)
    two.messages.insert(0, turn(inference_pb2.ROLE_SYSTEM, "be brief"))
    assert failure(two).reason == "MESSAGES_INVALID"


@pytest.mark.parametrize("count", [-1, 21])
def test_log_probabilities_of_at_most_twenty_tokens_are_told(count: int) -> None:
    request = ask("hi")
    request.sampling.top_logprobs = 20
    validate(request, RouterSettings())
    request.sampling.top_logprobs = count
    assert failure(request).reason == "SAMPLING_INVALID"
