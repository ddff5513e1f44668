"""Asking a running stack about held-out scenes."""

import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from rich.console import Console

from triptych import client
from triptych.demo.scenes import Example, Turn
from triptych.stack import StackSettings, running_stack
from triptych.v1 import inference_pb2

PICTURE_SIDE = 336
"""Pictures are sent larger than any encoder input, as people's are, and resized by the router."""


async def converse(
    service: client.AsyncClient, example: Example, options: client.Options, detail: client.Detail = "high"
) -> list[client.Answer]:
    """Returns the answers to a dialogue's questions; a later question sees the model's own earlier answers."""
    picture = io.BytesIO()
    example.image.save(picture, "PNG")
    options = replace(options, max_tokens=32, degrade=False, timeout_s=120)
    messages: list[inference_pb2.Message] = []
    answers: list[client.Answer] = []
    for turn in example.dialogue.turns:
        parts = (turn.question,) if messages else (picture.getvalue(), turn.question)
        messages.append(client.user(*parts, detail=detail))
        answers.append(await service.chat(messages, options))
        messages.append(client.assistant(answers[-1].text))
    return answers


def is_exact(answer: client.Answer, turn: Turn) -> bool:
    """Tells whether an answer is the only right one."""
    return answer.text.strip() == turn.answer


@asynccontextmanager
async def service_at(address: str | None, console: Console) -> AsyncIterator[client.AsyncClient]:
    """Yields a client of the router at `address`, or of a stack that runs as long as the context."""
    async with AsyncExitStack() as stack:
        if address is None:
            settings = StackSettings.from_environment().without_gateway().on_free_ports()
            console.print("starting a stack on free ports", highlight=False)
            await stack.enter_async_context(running_stack(settings, lambda name, line: None))
            address = settings.router_address
        yield await stack.enter_async_context(client.AsyncClient(address))
