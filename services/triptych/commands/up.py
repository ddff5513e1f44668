"""`triptych up`: the stack in the foreground, its logs prefixed by service."""

import asyncio
import json
import signal

from rich.console import Console
from rich.markup import escape

from triptych.stack import StackSettings, running_stack

_COLOURS = {"triton": "green", "worker": "magenta", "router": "cyan", "gateway": "blue"}


async def run(as_json: bool) -> int:
    """Runs until SIGINT or SIGTERM (returns 0) or until a service dies (returns 1).

    With `as_json` stdout gets one line, once all is ready; everything else goes to stderr.

    Raises Unavailable when the stack does not get ready.
    """
    console = Console(stderr=as_json)
    settings = StackSettings.from_environment()
    stopping = asyncio.Event()
    main_task = asyncio.current_task()
    ready = False

    def stop() -> None:
        stopping.set()
        if not ready and main_task is not None:
            main_task.cancel()  # Still starting: the clean-up of `running_stack` ends what has been started.

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)

    def sink(name: str, line: str) -> None:
        colour = _COLOURS.get(name, "white")
        console.print(f"[{colour}]{name:>7} |[/] {escape(line)}", highlight=False, soft_wrap=True)

    def on_ready(name: str, seconds: float) -> None:
        console.print(f"[bold]{name} is ready[/] after {seconds:.1f} s", highlight=False)

    try:
        async with running_stack(settings, sink, on_ready) as stack:
            ready = True
            address = settings.router_address
            console.print(f"[bold green]serving on {address}[/]  (Ctrl-C stops)", highlight=False)
            console.print(f'try: triptych ask --address {address} PICTURE "what is in the picture?"', highlight=False)
            if settings.gateway_url:
                console.print(
                    f"[bold green]web page: {settings.gateway_url}/[/]  OpenAI API: {settings.gateway_url}/v1"
                )
            if as_json:
                print(json.dumps({"router": address, "gateway": settings.gateway_url}), flush=True)
            death = asyncio.create_task(stack.wait())
            interrupt = asyncio.create_task(stopping.wait())
            done, pending = await asyncio.wait({death, interrupt}, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            if interrupt in done:
                console.print("stopping", highlight=False)
                return 0
            dead = death.result()
            console.print(
                f"[bold red]{dead.spec.name} ended with exit code {dead.exit_code}; stopping the others[/]",
                highlight=False,
            )
            return 1
    except asyncio.CancelledError:
        if not stopping.is_set():
            raise
        console.print("stopped while starting", highlight=False)
        return 0
