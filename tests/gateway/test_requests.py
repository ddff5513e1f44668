"""What OpenAI's members mean to the router."""

from typing import Any

import pytest

from tests.gateway.conftest import Rig, chat_body
from tests.gateway.fakes import MODEL
from triptych.gateway.translate import cache_salt, derived_seed
from triptych.v1 import generation_pb2, inference_pb2

URL = "data:image/png;base64,AAAA"


async def sent(rig: Rig, **members: Any) -> inference_pb2.GenerateRequest:
    """Returns what the router gets for a chat completion."""
    response = await rig.chat(**members)
    assert response.status_code == 200, response.text
    return rig.router.requests[-1]


async def test_defaults_are_openais_own(rig: Rig) -> None:
    request = await sent(rig)
    assert request.sampling.temperature == 1.0
    assert not request.sampling.HasField("seed") and not request.sampling.HasField("top_logprobs")
    assert request.stopping.max_tokens == 0 and not request.stopping.ignore_eos
    assert request.cache_salt == "" and not request.raw_prompt


async def test_a_visual_kv_policy_is_passed_on_and_the_reply_says_what_it_did(rig: Rig) -> None:
    assert (await sent(rig)).visual_kv == generation_pb2.VISUAL_KV_POLICY_UNSPECIFIED
    response = await rig.chat(triptych={"visual_kv": "compress_visual_merge"})
    assert rig.router.requests[-1].visual_kv == generation_pb2.VISUAL_KV_POLICY_COMPRESS_VISUAL_MERGE
    report = response.json()["triptych"]["visual_kv"]
    assert report == {"policy": "compress_visual_merge", "lossy": True, "saved_bytes": 99}
    refused = await rig.chat(triptych={"visual_kv": "zip"})
    assert refused.status_code == 400 and "visual_kv" in refused.text


async def test_sampling_and_stopping_are_passed_on(rig: Rig) -> None:
    request = await sent(rig, temperature=0.5, top_p=0.25, seed=9, max_tokens=7, max_completion_tokens=3, stop="x")
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0.5, 0.25, 9)
    assert request.stopping.max_tokens == 3 and list(request.stopping.stop) == ["x"]
    request = await sent(rig, stop=["x", "yy"], seed=-1)
    assert list(request.stopping.stop) == ["x", "yy"]
    assert request.sampling.seed == 2**64 - 1


async def test_roles_text_and_pictures_keep_their_order(rig: Rig) -> None:
    image = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    text = {"type": "text", "text": "what is it?"}
    request = await sent(
        rig,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [image, text, image], "name": "ann"},
            {"role": "assistant", "content": None},
            {"role": "user", "content": ""},
        ],
    )
    roles = [message.role for message in request.messages]
    assert roles == [
        inference_pb2.ROLE_SYSTEM,
        inference_pb2.ROLE_USER,
        inference_pb2.ROLE_ASSISTANT,
        inference_pb2.ROLE_USER,
    ]
    kinds = [[part.WhichOneof("content") for part in message.parts] for message in request.messages]
    assert kinds == [["text"], ["image", "text", "image"], ["text"], ["text"]]
    assert request.messages[1].parts[0].image.url == URL
    assert request.messages[1].parts[0].image.detail == inference_pb2.IMAGE_DETAIL_LOW


async def test_our_own_options_are_under_one_name(rig: Rig) -> None:
    image = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    options = {
        "priority": "economy",
        "resolution": "thumbnail",
        "reduction": "merge:32",
        "draft": False,
        "draft_threshold": 0.9,
        "cache_salt": "ann",
        "degrade": False,
        "request_id": "mine",
        "top_k": 5,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
    }
    request = await sent(rig, messages=[{"role": "user", "content": [image]}], triptych=options)
    assert request.request_id == "mine"
    assert request.priority == generation_pb2.PRIORITY_ECONOMY
    assert request.cache_salt == "ann"
    assert (request.reduction.method, request.reduction.tokens) == (inference_pb2.REDUCTION_METHOD_MERGE, 32)
    assert (request.draft.mode, request.draft.threshold) == (inference_pb2.DRAFT_MODE_OFF, 0.9)
    assert request.degradation_policy == inference_pb2.DEGRADATION_POLICY_FORBID
    assert request.messages[0].parts[0].image.detail == inference_pb2.IMAGE_DETAIL_THUMBNAIL
    assert (request.sampling.top_k, request.sampling.repetition_penalty) == (5, 1.5)
    assert request.stopping.ignore_eos


async def test_openais_hints_without_a_meaning_here_are_accepted(rig: Rig) -> None:
    await sent(
        rig,
        user="ann",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        reasoning_effort="low",
        verbosity="low",
        prompt_cache_key="k",
        safety_identifier="s",
        parallel_tool_calls=False,
        tool_choice="none",
        tools=[],
        functions=None,
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
        response_format={"type": "text"},
        modalities=["text"],
        prediction=None,
        n=1,
        logprobs=False,
    )


async def test_every_choice_has_a_name_and_a_seed_of_its_own(rig: Rig) -> None:
    await sent(rig, n=3, seed=5, triptych={"request_id": "r"})
    requests = sorted(rig.router.requests, key=lambda request: request.request_id)
    assert [request.request_id for request in requests] == ["r", "r:1", "r:2"]
    assert [request.sampling.seed for request in requests] == [derived_seed(5, index) for index in range(3)]
    assert len({request.sampling.seed for request in requests}) == 3


async def test_a_completion_is_a_raw_prompt_of_sixteen_tokens(rig: Rig) -> None:
    response = await rig.http.post("/v1/completions", json={"model": MODEL, "prompt": ["a", "b"], "n": 2})
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2, 3]
    requests = sorted(rig.router.requests, key=lambda request: int(f"0{request.request_id.partition(':')[2]}"))
    assert [request.messages[0].parts[0].text for request in requests] == ["a", "a", "b", "b"]
    assert all(request.raw_prompt and request.stopping.max_tokens == 16 for request in requests)
    # Each prompt counts once, each answer for itself.
    assert response.json()["usage"]["prompt_tokens"] == 2 * 5
    assert response.json()["usage"]["completion_tokens"] == 4 * 3


@pytest.mark.parametrize("knobs", [{"api_keys": "ann's, bob's"}], ids=["two keys"])
async def test_two_keys_share_no_cache_and_one_key_keeps_its_own(rig: Rig) -> None:
    salts = []
    for key, salt in (("ann's", ""), ("bob's", ""), ("ann's", ""), ("ann's", "x")):
        await rig.chat(headers={"Authorization": f"Bearer {key}"}, triptych={"cache_salt": salt})
        salts.append(rig.router.requests[-1].cache_salt)
    assert salts[0] == salts[2] and len(set(salts)) == 3
    assert all("ann" not in salt and len(salt) == 64 for salt in salts)


def test_salts_cannot_be_crafted_to_meet() -> None:
    assert cache_salt("ann", "x") != cache_salt("annx", "")
    assert cache_salt("", "x") == "x"


async def test_text_that_is_no_text_is_refused(rig: Rig) -> None:
    """Half a surrogate pair can be written in JSON but is no character."""
    body = '{"model": "fake", "messages": [{"role": "user", "content": "\\ud800"}]}'
    response = await rig.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_value"


async def test_null_means_left_out(rig: Rig) -> None:
    nullable = dict.fromkeys(("stop", "n", "seed", "temperature", "max_tokens", "stream", "triptych", "user"))
    assert (await rig.http.post("/v1/chat/completions", json=chat_body(**nullable))).status_code == 200
