"""The whole way: pictures and questions in, streamed words out."""

import asyncio
import io

import psutil
import pytest
from PIL import Image

from tests.stack.conftest import Up, noise_png, wait_idle
from triptych.client import AsyncClient, Client, Options, assistant, user
from triptych.demo import ANSWER, PICTURE, QUESTION
from triptych.demo.scenes import held_out
from triptych.errors import InvalidRequest, Overloaded, TriptychError
from triptych.rpc.health import is_serving
from triptych.v1 import inference_pb2
from triptych.visual_kv import VisualKvPolicy

pytestmark = pytest.mark.integration


async def test_the_bundled_picture_is_answered_right_and_in_order(served: Up) -> None:
    async with AsyncClient(served.router) as client:
        events = [event async for event in client.stream([user(PICTURE, QUESTION)])]
    kinds = [str(event.WhichOneof("event")) for event in events]
    assert kinds[0] == "started" and kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"chunk"}
    assert "".join(event.chunk.text for event in events[1:-1]) == ANSWER


async def test_most_held_out_questions_are_answered_exactly(served: Up) -> None:
    """A quick check of what `triptych evaluate` measures: 40 scenes, both turns of two-turn dialogues."""
    right = asked = 0
    async with AsyncClient(served.router) as client:
        for example in held_out(40):
            picture = as_png(example.image)
            messages: list[inference_pb2.Message] = []
            for turn in example.dialogue.turns:
                parts = (turn.question,) if messages else (picture, turn.question)
                messages.append(user(*parts))
                answer = await client.chat(messages, Options(max_tokens=32))
                messages.append(assistant(answer.text))
                asked += 1
                right += answer.text == turn.answer
    assert right / asked >= 0.9, f"{right} of {asked}"


def as_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_the_blocking_client_gives_the_same_answer_and_its_report(served: Up) -> None:
    with Client(served.router) as client:
        answer = client.ask(PICTURE, QUESTION, options=Options(request_id="report-1"))
        model = client.model()
    assert answer.text == ANSWER
    assert answer.finish_reason == "end"
    assert answer.started.request_id == "report-1"
    assert answer.started.model == model.name
    (image,) = answer.started.images
    assert image.encoded_side == model.native_image_side
    assert image.visual_tokens == model.native_visual_tokens == answer.usage.visual_tokens
    assert len(bytes.fromhex(image.identity)) == 32
    assert not answer.finished.degradations


def test_the_second_look_at_a_picture_needs_no_encoder(served: Up) -> None:
    picture = noise_png(7001)
    with Client(served.router) as client:
        first = client.ask(picture, "what is in the middle?")
        again = client.ask(picture, "what is in the middle?")
        other_tenant = client.ask(picture, "what is in the middle?", options=Options(cache_salt="other"))
    sources = [answer.started.images[0].source for answer in (first, again, other_tenant)]
    assert sources[0] == inference_pb2.FEATURE_SOURCE_ENCODER
    assert sources[1] in (inference_pb2.FEATURE_SOURCE_KV_CACHE, inference_pb2.FEATURE_SOURCE_ENCODER_CACHE)
    assert sources[2] == inference_pb2.FEATURE_SOURCE_ENCODER
    assert first.text == again.text == other_tenant.text
    assert "encode" not in again.stages


def test_every_visual_kv_policy_answers_and_the_answer_says_which(served: Up) -> None:
    with Client(served.router) as client:
        for policy in VisualKvPolicy:
            options = Options(visual_kv=policy)
            first = client.ask(PICTURE, QUESTION, options=options)
            assert first.text == ANSWER or (policy.lossy and first.text)
            report = first.finished.visual_kv
            assert (report.policy, report.lossy) == (policy.proto, policy.lossy)
            assert (report.saved_bytes > 0) == (policy is not VisualKvPolicy.EXACT)
            again = client.chat([user(PICTURE, QUESTION), assistant(ANSWER), user("where is the star?")], options)
            assert again.usage.cached_tokens > again.usage.visual_tokens
            assert again.finished.visual_kv.policy == policy.proto


def test_lower_detail_costs_fewer_tokens(served: Up) -> None:
    with Client(served.router) as client:
        answers = [client.ask(PICTURE, QUESTION, detail=detail) for detail in ("high", "medium", "low", "thumbnail")]
    tokens = [answer.usage.visual_tokens for answer in answers]
    assert tokens == sorted(tokens, reverse=True) and len(set(tokens)) == 4


@pytest.mark.parametrize("method", ["kmeans", "merge"])
def test_a_reduction_shortens_the_prompt_and_the_answer_is_still_about_the_picture(served: Up, method: str) -> None:
    with Client(served.router) as client:
        answer = client.ask(PICTURE, QUESTION, options=Options(reduce=f"{method}:32"))
        (image,) = answer.started.images
        assert (image.encoder_tokens, image.visual_tokens, answer.usage.visual_tokens) == (64, 32, 32)
        assert answer.text.startswith(ANSWER[: len(ANSWER) // 2])  # Places further on may be a square off.
        whole = client.ask(PICTURE, QUESTION)
        assert whole.started.images[0].identity != image.identity
        assert whole.usage.visual_tokens == 64


def test_a_reduction_that_nobody_knows_is_refused(served: Up) -> None:
    with Client(served.router) as client, pytest.raises(InvalidRequest, match="kmeans:N"):
        client.ask(PICTURE, QUESTION, options=Options(reduce="pool:4"))


@pytest.mark.parametrize(
    ("threshold", "outcome"), [(0.01, inference_pb2.DRAFT_OUTCOME_KEPT), (1.0, inference_pb2.DRAFT_OUTCOME_REJECTED)]
)
def test_a_draft_encoder_begins_the_answer_and_is_checked_against_the_encoder(
    served: Up, threshold: float, outcome: int
) -> None:
    """Which of the two is done first is chance where both are small, so several tries."""
    examples = held_out(60)
    with Client(served.router) as client:
        for number, example in enumerate(examples):
            salt = f"draft {threshold} {number}"
            options = Options(draft=True, draft_threshold=threshold, cache_salt=salt)
            answer = client.ask(as_png(example.image), example.dialogue.turns[0].question, options=options)
            report = answer.finished.draft
            assert report.outcome in (outcome, inference_pb2.DRAFT_OUTCOME_UNNEEDED)
            if report.outcome == outcome:
                break
        else:
            pytest.fail("the encoder was faster every time")
        assert answer.started.images[0].source == inference_pb2.FEATURE_SOURCE_DRAFT
        assert 0.5 < report.similarity < 1
        assert report.lowest_similarity < report.similarity
        plain = client.ask(as_png(example.image), example.dialogue.turns[0].question, options=Options(cache_salt=salt))
        assert plain.started.images[0].source == inference_pb2.FEATURE_SOURCE_ENCODER_CACHE or plain.usage.cached_tokens
        if outcome == inference_pb2.DRAFT_OUTCOME_REJECTED:
            assert answer.text == plain.text


def test_two_pictures_in_one_question_take_both_their_tokens(served: Up) -> None:
    with Client(served.router) as client:
        answer = client.ask(noise_png(7002), "and", noise_png(7003), "what is it?", options=Options(max_tokens=4))
        native = client.model().native_visual_tokens
    assert answer.usage.visual_tokens == 2 * native
    assert len({image.identity for image in answer.started.images}) == 2


def test_a_question_without_a_picture_is_answered_in_words(served: Up) -> None:
    with Client(served.router) as client:
        answer = client.ask("what is in the middle?")
    assert answer.usage.visual_tokens == 0
    assert "no picture" in answer.text


def test_a_placeholder_in_the_question_is_only_text(served: Up) -> None:
    with Client(served.router) as client:
        answer = client.ask(PICTURE, "what is <image> in <|end|> it?", options=Options(max_tokens=4))
        assert answer.usage.visual_tokens == client.model().native_visual_tokens


def test_a_seed_repeats_a_sampled_answer_and_stop_strings_never_show(served: Up) -> None:
    options = Options(temperature=2.0, seed=5, max_tokens=24, ignore_eos=True)
    with Client(served.router) as client:
        first, again = (client.ask(PICTURE, QUESTION, options=options) for _ in range(2))
        assert first.text == again.text
        word = ANSWER.split()[-1]
        stopped = client.ask(PICTURE, QUESTION, options=Options(stop=[word]))
    assert word not in stopped.text and stopped.finish_reason == "stop"


async def test_200_image_requests_at_once_all_end(served: Up) -> None:
    async with AsyncClient(served.router) as client:

        async def one(number: int) -> str:
            try:
                answer = await client.ask(noise_png(number, 64), "how many shapes?", options=Options(timeout_s=120))
            except Overloaded:
                return "refused"
            except TriptychError as error:
                return f"lost: {error.reason} {error.message}"
            kinds = {degradation.kind for degradation in answer.finished.degradations}
            return "text only" if inference_pb2.DEGRADATION_KIND_TEXT_ONLY in kinds else "answered"

        router = next(p for p in psutil.Process(served.process.pid).children(recursive=True) if "router" in p.cmdline())
        before = router.memory_info().rss
        outcomes = await asyncio.gather(*(one(8000 + number) for number in range(200)))
        assert router.memory_info().rss - before < 300 << 20
    assert not [outcome for outcome in outcomes if outcome.startswith("lost")], set(outcomes)
    assert outcomes.count("answered") >= 100, {outcome: outcomes.count(outcome) for outcome in set(outcomes)}
    await wait_idle(served.worker)
    assert await is_serving(served.router)
