"""A gateway in front of a fake router, as a process of its own: `python -m tests.gateway.serve_fake` prints its URL."""

import asyncio
import signal

from tests.gateway.fakes import FakeRouter, running_router
from triptych.config import GatewaySettings
from triptych.gateway.server import run_gateway


async def main() -> None:
    """Runs until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with running_router(FakeRouter()) as address, run_gateway(GatewaySettings(router=address), port=0) as port:
        print(f"http://127.0.0.1:{port}", flush=True)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main())
