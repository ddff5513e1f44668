"""A real gateway over loopback HTTP with a fake router behind it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from tests.gateway.fakes import MODEL, FakeRouter, running_router
from triptych.config import GatewaySettings
from triptych.gateway.server import run_gateway


@dataclass
class Rig:
    """Everything a test of the gateway touches."""

    router: FakeRouter
    url: str
    http: httpx2.AsyncClient = field(repr=False)

    async def chat(self, headers: dict[str, str] | None = None, **body: Any) -> httpx2.Response:
        """Posts a chat completion."""
        return await self.http.post("/v1/chat/completions", json=chat_body(**body), headers=headers)


def chat_body(**members: Any) -> dict[str, Any]:
    """Returns a body that is answered, with some members replaced."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **members}


@pytest.fixture
def knobs() -> dict[str, Any]:
    """Knobs of the gateway; a test overrides them with `@pytest.mark.parametrize("knobs", [...])`."""
    return {}


@pytest.fixture
async def rig(knobs: dict[str, Any]) -> AsyncIterator[Rig]:
    async with running_rig(knobs) as rig:
        yield rig


@asynccontextmanager
async def running_rig(knobs: dict[str, Any]) -> AsyncIterator[Rig]:
    """Runs a gateway with a fake router; nothing may be left running in either."""
    fake = FakeRouter()
    async with running_router(fake) as address:
        settings = GatewaySettings(**{"router": address, **knobs})
        async with run_gateway(settings, port=0) as port:
            url = f"http://127.0.0.1:{port}"
            async with httpx2.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
                yield Rig(fake, url, http)
        async with asyncio.timeout(5):
            while fake.running:
                await asyncio.sleep(0.01)
