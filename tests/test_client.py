"""Requests are built as the contract says."""

from pathlib import Path

import pytest

from triptych.client import Options, assistant, build_request, system, user
from triptych.errors import InvalidRequest
from triptych.v1 import generation_pb2, inference_pb2


def test_parts_keep_their_order_and_detail(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"file")
    message = user("before", picture, b"raw", "after", detail="low")
    kinds = [part.WhichOneof("content") for part in message.parts]
    assert kinds == ["text", "image", "image", "text"]
    assert [part.image.data for part in message.parts[1:3]] == [b"file", b"raw"]
    assert {part.image.detail for part in message.parts[1:3]} == {inference_pb2.IMAGE_DETAIL_LOW}


def test_a_missing_picture_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"nowhere\.png"):
        user(tmp_path / "nowhere.png", "what is it?")


def test_unset_options_stay_unset() -> None:
    request = build_request([user("hi")], Options())
    assert not request.sampling.HasField("seed")
    assert not request.sampling.HasField("top_p")
    assert request.degradation_policy == inference_pb2.DEGRADATION_POLICY_ALLOW


def test_options_reach_their_fields() -> None:
    dialogue = [system("be brief"), user("hi"), assistant("hello"), user("bye")]
    options = Options(max_tokens=5, temperature=0.5, top_p=0.9, seed=0, stop=["x"], priority="economy", degrade=False)
    request = build_request(dialogue, options)
    assert [message.role for message in request.messages] == [1, 2, 3, 2]
    assert request.sampling.HasField("seed") and request.sampling.seed == 0
    assert request.stopping.max_tokens == 5 and list(request.stopping.stop) == ["x"]
    assert request.priority == generation_pb2.PRIORITY_ECONOMY
    assert request.degradation_policy == inference_pb2.DEGRADATION_POLICY_FORBID
