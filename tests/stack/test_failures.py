"""A stage that dies, hangs or is fed rubbish: a typed error in time, and an honest health."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import psutil
import pytest

from tests.stack.conftest import Up, load_of, noise_png, wait_idle
from triptych import errors
from triptych.client import AsyncClient, Options, user
from triptych.demo import ANSWER, PICTURE, QUESTION
from triptych.rpc.health import is_serving
from triptych.stack import Stack, StackSettings, running_stack
from triptych.v1 import inference_pb2

pytestmark = pytest.mark.integration


@dataclass
class Own:
    """A stack that a test may hurt."""

    settings: StackSettings
    stack: Stack

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to one service; for Triton to tritonserver itself, not to what started it."""
        process = psutil.Process(self.stack.pid_of(name))
        family = [process, *process.children(recursive=True)]
        servers = [member for member in family if member.name() == "tritonserver"]
        (servers or [process])[0].send_signal(number)


@pytest.fixture
async def own() -> AsyncIterator[Own]:
    settings = StackSettings.from_environment().on_free_ports()
    router = settings.router.model_copy(update={"encode_timeout_s": 5.0})
    # The C++ engine's longest answer takes less than a second: too short to be hurt in the middle on a busy machine.
    worker = settings.worker.model_copy(update={"kernels": "torch"})
    settings = replace(settings, router=router, worker=worker)
    async with running_stack(settings, lambda name, line: None) as stack:
        yield Own(settings, stack)


async def becomes(address: str, serving: bool, timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if await is_serving(address) == serving:
            return True
        await asyncio.sleep(0.2)
    return False


async def test_killing_triton_in_mid_request_is_a_typed_error_and_shows_in_health(own: Own) -> None:
    async with AsyncClient(own.settings.router_address) as client:
        own.signal("triton", signal.SIGSTOP)  # Holds the request in the encode stage.
        request = asyncio.create_task(client.ask(noise_png(1), "what is it?", options=Options(timeout_s=20)))
        await asyncio.sleep(0.5)
        started = time.monotonic()
        own.signal("triton", signal.SIGKILL)
        with pytest.raises(errors.Unavailable) as caught:
            await request
        assert time.monotonic() - started < 5
        assert caught.value.reason == "ENCODER_UNAVAILABLE"
        assert await becomes(own.settings.router_address, serving=False)
        with pytest.raises(errors.Unavailable):
            await client.ask(noise_png(2), "what is it?", options=Options(timeout_s=20))
        assert (await client.ask("is there a circle?", options=Options(timeout_s=20))).text


async def test_killing_the_worker_in_mid_stream_is_a_typed_error_and_shows_in_health(own: Own) -> None:
    async with AsyncClient(own.settings.router_address) as client:
        options = Options(max_tokens=1500, ignore_eos=True, timeout_s=30)
        killed = False
        with pytest.raises(errors.Unavailable) as caught:
            async for event in client.stream([user(PICTURE, QUESTION)], options):
                if event.WhichOneof("event") == "chunk" and not killed:  # More chunks may be on their way.
                    own.signal("worker", signal.SIGKILL)
                    killed = True
        assert caught.value.reason == "WORKER_UNAVAILABLE"
        assert await becomes(own.settings.router_address, serving=False)
        started = time.monotonic()
        with pytest.raises(errors.Unavailable):
            await client.ask(PICTURE, QUESTION, options=Options(timeout_s=20))
        assert time.monotonic() - started < 15


async def test_a_hanging_encoder_is_text_only_or_an_error_as_the_caller_wishes_and_recovers(own: Own) -> None:
    async with AsyncClient(own.settings.router_address) as client:
        own.signal("triton", signal.SIGSTOP)
        degraded, refused = await asyncio.gather(
            client.ask(noise_png(3), "what is in the middle?", options=Options(timeout_s=30)),
            client.ask(noise_png(4), "what is it?", options=Options(timeout_s=30, degrade=False)),
            return_exceptions=True,
        )
        assert not isinstance(degraded, BaseException)
        kinds = [degradation.kind for degradation in degraded.finished.degradations]
        assert kinds == [inference_pb2.DEGRADATION_KIND_TEXT_ONLY]
        assert degraded.usage.visual_tokens == 0 and "no picture" in degraded.text
        assert isinstance(refused, errors.StageTimeout) and refused.reason == "ENCODE_TIMEOUT"
        assert await becomes(own.settings.router_address, serving=False)
        own.signal("triton", signal.SIGCONT)
        assert await becomes(own.settings.router_address, serving=True)
        assert (await client.ask(PICTURE, QUESTION, options=Options(timeout_s=30))).text == ANSWER


async def test_a_hanging_worker_is_an_error_and_shows_in_health(own: Own) -> None:
    async with AsyncClient(own.settings.router_address) as client:
        options = Options(max_tokens=1500, ignore_eos=True, timeout_s=60)
        stopped = 0.0
        with pytest.raises(errors.TriptychError) as caught:
            async for event in client.stream([user(PICTURE, QUESTION)], options):
                if event.WhichOneof("event") == "chunk" and not stopped:
                    own.signal("worker", signal.SIGSTOP)
                    stopped = time.monotonic()
        assert time.monotonic() - stopped < 20
        assert isinstance(caught.value, errors.Unavailable | errors.StageTimeout)
        assert await becomes(own.settings.router_address, serving=False)
        own.signal("worker", signal.SIGCONT)
        assert await becomes(own.settings.router_address, serving=True)
        await wait_idle(f"127.0.0.1:{own.settings.worker.port}")


async def test_nothing_is_left_when_a_stack_ends_after_a_kill(own: Own) -> None:
    pids = [own.stack.pid_of(name) for name in ("triton", "worker", "router")]
    family = [child for pid in pids for child in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
    own.signal("triton", signal.SIGKILL)
    await own.stack.stop()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


async def test_cancelled_requests_free_everything_in_every_stage(served: Up) -> None:
    async with AsyncClient(served.router) as client:

        async def cancel_after(number: int, events: int) -> None:
            options = Options(max_tokens=300, ignore_eos=True)
            stream = client.stream([user(noise_png(number, 64), "what is it?")], options)
            async for _ in stream:
                events -= 1
                if events <= 0:
                    break
            await stream.aclose()

        async def cancel_early(number: int) -> None:
            task = asyncio.create_task(client.ask(noise_png(number, 64), "what is it?"))
            await asyncio.sleep(0.001 * (number % 60))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(cancel_after(2000 + n, n % 6) for n in range(30)), *(cancel_early(n) for n in range(60)))
        load = await wait_idle(served.worker)
        assert load.used_blocks == 0
        assert await is_serving(
            served.router
        )  # The worker checks its integrity when idle and gives up health if it fails.
        assert (await client.ask(PICTURE, QUESTION)).text == ANSWER
    assert not [line for line in served.lines if "do not add up" in line or "IntegrityError" in line]


BAD_IMAGES = {
    "cut off": (noise_png(1)[:-200], "IMAGE_CORRUPT"),
    "damaged": (noise_png(1)[:300] + b"\0" * 64 + noise_png(1)[364:], "IMAGE_CORRUPT"),
    "not an image": (b"hello", "IMAGE_UNSUPPORTED"),
    "empty": (b"", "IMAGE_CORRUPT"),
    "huge": (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x01\x00\x00\x00\x01\x00\x00\x08\x02\x00\x00\x00" + b"\0" * 4,
        "IMAGE_TOO_LARGE",
    ),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
async def test_a_bad_image_is_refused_with_a_reason_and_the_next_request_answers(served: Up, name: str) -> None:
    data, reason = BAD_IMAGES[name]
    async with AsyncClient(served.router) as client:
        bad, good = await asyncio.gather(
            client.ask(data, "what is it?"), client.ask(PICTURE, QUESTION), return_exceptions=True
        )
        assert isinstance(bad, errors.InvalidRequest), bad
        assert bad.reason == reason
        assert not isinstance(good, BaseException) and good.text == ANSWER
        assert (await client.ask(PICTURE, QUESTION)).text == ANSWER
    assert not (await load_of(served.worker)).waiting


async def test_too_many_images_names_the_limit(served: Up) -> None:
    async with AsyncClient(served.router) as client:
        limit = (await client.model()).max_images
        with pytest.raises(errors.InvalidRequest, match=str(limit)) as caught:
            await client.ask(*[PICTURE] * (limit + 1), "what is it?")
    assert caught.value.reason == "TOO_MANY_IMAGES"
