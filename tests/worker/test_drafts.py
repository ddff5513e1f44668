"""Generations on draft features: a real worker over loopback gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.worker.checkpoints import Reference
from tests.worker.driving import identity_of
from tests.worker.serving import QUESTION, Client, image, request, settings_for, text_of
from triptych import tensors
from triptych.errors import TriptychError
from triptych.rpc.status import from_rpc_error
from triptych.v1 import generation_pb2, worker_pb2
from triptych.worker.server import run_worker

pytestmark = pytest.mark.slow

Events = list[worker_pb2.WorkerGenerateResponse]
STEPS = generation_pb2.StoppingParameters(max_tokens=24, ignore_eos=True)
KEEP = worker_pb2.SettleDraftRequest(id="d", keep=True)


def drafted(
    *images: worker_pb2.PromptImage, early_text: bool = False, **fields: Any
) -> worker_pb2.WorkerGenerateRequest:
    draft = worker_pb2.Draft(id="d", early_text=early_text)
    return request(*images, draft=draft, **{"stopping": STEPS, **fields})


def final(*images: worker_pb2.PromptImage) -> worker_pb2.SettleDraftRequest:
    return worker_pb2.SettleDraftRequest(id="d", images=images)


def plain(*images: worker_pb2.PromptImage) -> worker_pb2.WorkerGenerateRequest:
    return request(*images, stopping=STEPS)


async def refused(client: Client, verdict: worker_pb2.SettleDraftRequest) -> TriptychError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.stub.SettleDraft(verdict)
    return from_rpc_error(caught.value)


class Answering:
    """A generation whose events are collected as they come."""

    def __init__(self, client: Client, request: worker_pb2.WorkerGenerateRequest) -> None:
        self.events: Events = []
        self._call = client.stub.Generate(request)
        self._task = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        async for event in self._call:
            self.events.append(event)

    def kinds(self) -> list[str]:
        return [str(event.WhichOneof("event")) for event in self.events]

    async def seen(self, kind: str) -> None:
        async with asyncio.timeout(10):
            while kind not in self.kinds():
                assert not self._task.done(), self._task
                await asyncio.sleep(0.005)

    async def end(self) -> Events:
        await self._task
        return self.events

    async def leave(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def begin(client: Client, request: worker_pb2.WorkerGenerateRequest) -> Answering:
    """Returns a generation that the worker has queued."""
    answering = Answering(client, request)
    await answering.seen("started")
    return answering


async def computed(client: Client, tokens: int) -> None:
    """Waits until the engine has computed so many tokens more."""
    engine = client.worker.model.engine
    goal = engine.computed_tokens + tokens
    async with asyncio.timeout(10):
        while engine.computed_tokens < goal:
            await asyncio.sleep(0.005)


async def test_nothing_is_told_before_the_verdict_although_it_is_computed(
    client: Client, tiny_reference: Reference
) -> None:
    expected = text_of(await client.answer(plain(image(tiny_reference, 1))))
    before = client.worker.model.engine.computed_tokens
    answering = await begin(client, drafted(image(tiny_reference, 2)))
    while await client.worker.engine.call(lambda engine: engine.has_work):
        await asyncio.sleep(0.01)
    assert client.worker.model.engine.computed_tokens > before + 24
    assert answering.kinds() == ["started"]
    settled = await client.stub.SettleDraft(final(image(tiny_reference, 1)))
    assert 0 < settled.drafted_tokens <= 24
    events = await answering.end()
    assert text_of(events) == expected
    assert answering.kinds() == ["started", *["chunk"] * (len(events) - 2), "finished"]


async def test_a_draft_that_is_kept_gives_the_answer_of_its_features_without_another_prefill(
    client: Client, tiny_reference: Reference
) -> None:
    answering = await begin(client, drafted(image(tiny_reference, 2)))
    await client.stub.SettleDraft(KEEP)
    events = await answering.end()
    assert text_of(events) == text_of(await client.answer(plain(image(tiny_reference, 2))))
    usage = events[-1].finished.usage
    assert (usage.cached_tokens, usage.output_tokens) == (0, 24)


async def test_a_draft_that_is_kept_in_mid_answer_goes_on(client: Client, tiny_reference: Reference) -> None:
    stopping = generation_pb2.StoppingParameters(max_tokens=300, ignore_eos=True)
    answering = await begin(client, drafted(image(tiny_reference, 2), stopping=stopping))
    await computed(client, 40)
    await client.stub.SettleDraft(KEEP)
    events = await answering.end()
    assert text_of(events) == text_of(await client.answer(request(image(tiny_reference, 2), stopping=stopping)))
    assert events[-1].finished.usage.output_tokens == 300


async def test_rejected_features_are_prefilled_again_from_the_first_image_on(
    client: Client, tiny_reference: Reference
) -> None:
    before_image = worker_pb2.PromptPart(text=QUESTION)
    begun, cold = drafted(image(tiny_reference, 2)), plain(image(tiny_reference, 1))
    for one in (begun, cold):
        one.prompt.messages[0].parts.insert(0, before_image)
    cold.prompt.cache_salt = "cold"
    answering = await begin(client, begun)
    while await client.worker.engine.call(lambda engine: engine.has_work):
        await asyncio.sleep(0.01)
    await client.stub.SettleDraft(final(image(tiny_reference, 1)))
    events = await answering.end()
    # The text before the image, in whole blocks, and nothing of the image or behind it.
    assert 16 <= events[-1].finished.usage.cached_tokens <= events[0].started.prompt_tokens - 16 - 16
    assert text_of(events) == text_of(await client.answer(cold))


async def test_kv_of_a_draft_is_never_found_under_the_final_identity(client: Client, tiny_reference: Reference) -> None:
    bare = image(tiny_reference, 1, features=False)
    probe = worker_pb2.ProbeCacheRequest(prompt=request(bare).prompt)
    for verdict in (KEEP, final(image(tiny_reference, 3))):
        answering = await begin(client, drafted(image(tiny_reference, 2)))
        await client.stub.SettleDraft(verdict)
        await answering.end()
        assert list((await client.stub.ProbeCache(probe)).images_covered) == [False]
    assert (await client.refusal(request(bare))).reason == "FEATURES_REQUIRED"


async def test_only_the_image_that_differs_is_replaced(client: Client, tiny_reference: Reference) -> None:
    first, draft, right = (image(tiny_reference, seed) for seed in (1, 2, 3))
    expected = text_of(await client.answer(plain(first, right)))
    answering = await begin(client, drafted(first, draft))
    await client.stub.SettleDraft(final(worker_pb2.PromptImage(), right))
    events = await answering.end()
    assert text_of(events) == expected
    assert events[-1].finished.usage.visual_tokens == 32


async def test_early_text_comes_at_once_and_is_retracted_when_it_was_wrong(
    client: Client, tiny_reference: Reference
) -> None:
    expected = text_of(await client.answer(plain(image(tiny_reference, 1))))
    answering = await begin(client, drafted(image(tiny_reference, 2), early_text=True))
    await answering.seen("chunk")
    await client.stub.SettleDraft(final(image(tiny_reference, 1)))
    events = await answering.end()
    kinds = answering.kinds()
    assert kinds.count("retracted") == kinds.count("finished") == 1
    assert text_of(events[kinds.index("retracted") :]) == expected


async def test_early_text_that_was_right_is_never_finished_before_the_verdict(
    client: Client, tiny_reference: Reference
) -> None:
    answering = await begin(client, drafted(image(tiny_reference, 2), early_text=True))
    while await client.worker.engine.call(lambda engine: engine.has_work):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert "finished" not in answering.kinds()
    await client.stub.SettleDraft(KEEP)
    events = await answering.end()
    assert "retracted" not in answering.kinds()
    assert text_of(events) == text_of(await client.answer(plain(image(tiny_reference, 2))))


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.4], ids=["at once", "computing", "computed"])
async def test_a_client_that_leaves_before_the_verdict_frees_everything(
    client: Client, tiny_reference: Reference, wait_s: float
) -> None:
    answering = await begin(client, drafted(image(tiny_reference, 2)))
    await asyncio.sleep(wait_s)
    await answering.leave()
    await client.settle()
    assert (await refused(client, KEEP)).reason == "DRAFT_UNKNOWN"
    assert (await client.answer(request()))[-1].HasField("finished")


async def test_a_client_that_leaves_with_the_verdict_frees_everything(
    client: Client, tiny_reference: Reference
) -> None:
    for _ in range(4):
        answering = await begin(client, drafted(image(tiny_reference, 2)))
        verdict = client.stub.SettleDraft(final(image(tiny_reference, 1)))
        await asyncio.gather(verdict, answering.leave(), return_exceptions=True)
        await client.settle()


@asynccontextmanager
async def impatient(folder: Path) -> AsyncIterator[Client]:
    async with run_worker(settings_for(folder, draft_timeout_s=0.3)) as worker:
        client = Client(worker)
        yield client
        await client.settle()
        await client.channel.close()


@pytest.mark.parametrize("max_tokens", [4, 400], ids=["computed", "computing"])
async def test_a_verdict_that_never_comes_ends_the_generation(
    tiny_dir: Path, tiny_reference: Reference, max_tokens: int
) -> None:
    async with impatient(tiny_dir) as client:
        stopping = generation_pb2.StoppingParameters(max_tokens=max_tokens, ignore_eos=True)
        error = await client.refusal(drafted(image(tiny_reference, 2), stopping=stopping))
        assert error.reason == "DRAFT_TIMEOUT"
        assert "draft_timeout_s=0.3" in error.message
        await client.settle()
        assert (await refused(client, KEEP)).reason == "DRAFT_UNKNOWN"


async def test_a_verdict_that_does_not_fit_is_refused_and_another_may_follow(
    client: Client, tiny_reference: Reference
) -> None:
    right = image(tiny_reference, 1)
    nameless = worker_pb2.PromptImage(identity=b"short", token_count=16, features=right.features)
    bare = image(tiny_reference, 1, features=False)
    rows = tensors.from_proto(right.features)[:8]
    shorter = worker_pb2.PromptImage(identity=identity_of(1), token_count=8, features=tensors.to_proto(rows))
    answering = await begin(client, drafted(image(tiny_reference, 2)))
    for verdict in (final(), final(right, right), final(nameless), final(bare), final(shorter)):
        assert (await refused(client, verdict)).reason == "INVALID_REQUEST"
    await client.stub.SettleDraft(final(right))
    assert (await refused(client, KEEP)).reason == "DRAFT_UNKNOWN"
    assert (await answering.end())[-1].HasField("finished")


async def test_two_drafts_of_one_name_cannot_wait_at_once(client: Client, tiny_reference: Reference) -> None:
    answering = await begin(client, drafted(image(tiny_reference, 2)))
    assert (await client.refusal(drafted(image(tiny_reference, 2)))).reason == "INVALID_REQUEST"
    await client.stub.SettleDraft(KEEP)
    assert (await answering.end())[-1].HasField("finished")


async def test_drafts_among_other_requests_change_nobodys_answer(client: Client, tiny_reference: Reference) -> None:
    whole = [request(image(tiny_reference, n % 3), text=f"{n} {QUESTION}", stopping=STEPS) for n in range(8)]
    expected = [text_of(await client.answer(one)) for one in whole]

    async def through_a_draft(n: int) -> str:
        begun = worker_pb2.WorkerGenerateRequest()
        begun.CopyFrom(whole[n])
        begun.prompt.images[0].CopyFrom(image(tiny_reference, 10 + n))
        begun.draft.id = f"draft-{n}"
        answering = await begin(client, begun)
        await asyncio.sleep(0.01 * n)
        await client.stub.SettleDraft(
            worker_pb2.SettleDraftRequest(id=f"draft-{n}", images=[image(tiny_reference, n % 3)])
        )
        return text_of(await answering.end())

    async def straight(n: int) -> str:
        return text_of(await client.answer(whole[n]))

    texts = await asyncio.gather(*map(through_a_draft, range(8)), *map(straight, range(8)))
    assert texts == expected * 2
