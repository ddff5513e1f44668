"""The OpenAI server that `bench peers` puts around engines without one."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.bench.llava import VISUAL_TOKENS, write_small_llava
from tests.bench.toy_engine import Toy
from tests.worker.checkpoints import write_text_only
from triptych.bench.content import make_picture
from triptych.bench.peers.shim.server import Engine, serve
from triptych.bench.targets.http import HttpTarget
from triptych.bench.targets.target import Piece, RequestFailed, Usage
from triptych.bench.workload import Ask, Message


class Served:
    """An engine behind the shim, on a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self._server = serve(engine, "toy", 0)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def toy() -> Iterator[tuple[Toy, Served]]:
    engine = Toy(0.001)
    served = Served(engine)
    yield engine, served
    served.stop()


async def answer(target: HttpTarget, *messages: Message, tokens: int = 4) -> tuple[list[str], Usage]:
    pieces, usage = [], None
    async for item in target.stream(Ask(messages, tokens)):
        if isinstance(item, Piece):
            pieces.append(item.text)
        else:
            usage = item
    assert usage is not None
    return pieces, usage


async def test_the_client_gets_each_token_and_the_counts(toy: tuple[Toy, Served]) -> None:
    target = HttpTarget(toy[1].url)
    await target.prepare()
    pieces, usage = await answer(target, Message("user", "a b c"))
    assert (target.model, pieces) == ("toy", ["0 ", "1 ", "2 ", "3 "])
    assert (usage.prompt_tokens, usage.output_tokens) == (3, 4)
    await target.close()


async def test_many_are_answered_at_once(toy: tuple[Toy, Served]) -> None:
    target = HttpTarget(toy[1].url)
    await target.prepare()
    answers = await asyncio.gather(*(answer(target, Message("user", "hi"), tokens=20) for _ in range(16)))
    assert all(usage.output_tokens == 20 for _, usage in answers)
    await target.close()


async def test_pictures_come_in_order_with_their_place_in_the_text(toy: tuple[Toy, Served]) -> None:
    engine, served = toy
    target = HttpTarget(served.url)
    await target.prepare()
    await answer(target, Message("user", "which?", (b"one", b"two")))
    messages, pictures = engine.asked[-1]
    assert pictures == [b"one", b"two"]
    assert messages[0]["content"] == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "which?"}]
    await target.close()


async def test_a_client_that_leaves_ends_its_answer(toy: tuple[Toy, Served]) -> None:
    engine, served = toy
    target = HttpTarget(served.url)
    await target.prepare()
    stream = target.stream(Ask((Message("user", "hi"),), 100_000))
    await anext(stream)
    await stream.aclose()
    await target.close()
    async with asyncio.timeout(5):
        while not engine.given_up:
            await asyncio.sleep(0.01)


async def test_what_an_engine_refuses_is_a_failed_request() -> None:
    class Refuses:
        def stream(self, messages: object, pictures: object, max_tokens: int) -> tuple[int, Iterator[str]]:
            raise ValueError("no pictures here")

    served = Served(Refuses())
    target = HttpTarget(served.url)
    await target.prepare()
    with pytest.raises(RequestFailed, match="HTTP 400"):
        await answer(target, Message("user", "hi"))
    await target.close()
    served.stop()


async def test_transformers_batch_what_waits_and_give_each_as_many_tokens_as_it_asked_for(tmp_path: Path) -> None:
    from triptych.bench.peers.shim.transformers_engine import load

    folder = write_text_only(tmp_path / "tiny")
    served = Served(load(SimpleNamespace(model=str(folder), dtype="float32", threads=1)))
    target = HttpTarget(served.url)
    await target.prepare()
    short, long = await asyncio.gather(
        answer(target, Message("user", "hello"), tokens=3), answer(target, Message("user", "hello there"), tokens=7)
    )
    assert [usage.output_tokens for _, usage in (short, long)] == [3, 7]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "hello there"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, min_new_tokens=7, max_new_tokens=7)[
        0, inputs["input_ids"].shape[1] :
    ]
    assert long[1].prompt_tokens == inputs["input_ids"].shape[1]
    assert long[0] == [tokenizer.decode([token]) for token in ids.tolist()]
    await target.close()
    served.stop()


async def test_transformers_answer_about_pictures_beside_texts(tmp_path: Path) -> None:
    from triptych.bench.peers.shim.transformers_engine import load

    folder = write_small_llava(tmp_path)
    served = Served(load(SimpleNamespace(model=str(folder), dtype="float32", threads=1)))
    target = HttpTarget(served.url)
    await target.prepare()
    picture = make_picture(np.random.default_rng(0), 60)
    seen, told = await asyncio.gather(
        answer(target, Message("user", "what is it?", (picture,)), tokens=3),
        answer(target, Message("user", "what is it?"), tokens=3),
    )
    assert seen[1].prompt_tokens == (told[1].prompt_tokens or 0) + VISUAL_TOKENS
    assert seen[1].output_tokens == told[1].output_tokens == 3
    await target.close()
    served.stop()
