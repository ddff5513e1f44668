"""The engine's own thread, and how asyncio talks to it: commands go in between steps, events come back in batches."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

from triptych.errors import IntegrityError, TriptychError, Unavailable
from triptych.worker.engine.engine import Engine
from triptych.worker.engine.events import Completed, Event, Failed
from triptych.worker.engine.request import GenerationRequest
from triptych.worker.engine.sequence import Sequence

log = logging.getLogger(__name__)

T = TypeVar("T")

# How often an idle engine shows that it lives, in seconds.
_HEARTBEAT_S = 0.25
# How long `stop` waits for a step to end, in seconds; the thread dies with the process.
_STOP_TIMEOUT_S = 10.0


class Generation:
    """One request, seen from the event loop."""

    def __init__(self, cancel: Callable[["Generation"], None]) -> None:
        self._cancel = cancel
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.sequence: Sequence | None = None  # Set and used by the engine's thread.

    async def events(self) -> AsyncIterator[Event]:
        """Yields the request's events up to Completed. Raises the TriptychError of a Failed one."""
        while True:
            event = await self.next_event()
            yield event
            if isinstance(event, Completed):
                return

    async def next_event(self) -> Event:
        """Returns the next event; a call that is cancelled takes none. Raises the TriptychError of a Failed one."""
        event = await self._events.get()
        if isinstance(event, Failed):
            raise event.error
        return event

    def cancel(self) -> None:
        """Ends the request before the next step; does nothing if it has ended."""
        self._cancel(self)

    def deliver(self, event: Event) -> None:
        """Takes an event; called on the event loop."""
        self._events.put_nowait(event)


class EngineThread:
    """Runs an engine's steps in a thread. Methods are for the event loop that called `start`; none waits for a step.

    Attributes:
        load: The engine's state after its latest step or command.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._generations: dict[Sequence, Generation] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = threading.Lock()  # Nothing enters the inbox once it is closed.
        self._closed = False
        self._stopped = False  # Set in the thread: the loop ends.
        self._checked = True  # Nothing has happened since the engine's books were checked.
        self._progress_s = time.monotonic()
        self.load = engine.load()

    def start(self) -> None:
        """Starts the thread; events go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._progress_s = time.monotonic()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after the current step, if that ends soon. Requests still in it fail with Unavailable."""
        with self._closing:
            self._closed = True
            self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join, _STOP_TIMEOUT_S)

    def submit(self, request: GenerationRequest) -> Generation:
        """Hands a request to the engine. Raises Unavailable when it is stopping or dead."""
        generation = Generation(lambda generation: self._inbox.put(partial(self._cancel, generation)))
        self._enter(partial(self._submit, request, generation))
        return generation

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Runs a quick function on the engine between two steps or while one computes.

        Returns what it returns. Raises what it raises, and Unavailable when the engine is stopping or dead.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value = function(self._engine)
            except Exception as error:
                self._on_loop(partial(_reject, result, error))
            else:
                self._on_loop(partial(_resolve, result, value))

        self._enter(run)
        return await result

    def seconds_without_progress(self) -> float:
        """Returns for how long the engine has had work, or been dead, without computing anything."""
        return time.monotonic() - self._progress_s

    def _enter(self, command: Callable[[], None]) -> None:
        with self._closing:
            if self._closed:
                raise Unavailable("the worker's engine is not running")
            self._inbox.put(command)

    # From here on: in the engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._serve_inbox()
                computed = self._engine.computed_tokens
                if self._engine.has_work:
                    self._step()
                if not self._engine.has_work or self._engine.computed_tokens != computed:
                    self._progress_s = time.monotonic()
                self.load = self._engine.load()
            self._tell(self._engine.tell())
        except Exception:
            log.exception("the engine died")
        finally:
            self._close()

    def _serve_inbox(self) -> None:
        """Runs waiting commands; waits for one, but not for ever, when there is nothing else to do."""
        try:
            if not self._engine.has_work:
                self._inbox.get(timeout=_HEARTBEAT_S)()
                self._checked = False
        except queue.Empty:
            self._check_integrity()
        self._run_commands()

    def _run_commands(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()

    def _step(self) -> None:
        """Runs a step, and what need not wait for it while it computes."""
        try:
            self._engine.start()
        except Exception:
            log.exception("a step could not be planned; all requests fail")
            self._tell(self._engine.abort(TriptychError("internal error; the worker's log has the details")))
            return
        self._tell(self._engine.tell())
        self._run_commands()
        self._engine.finish()

    def _tell(self, happened: list[tuple[Sequence, Event]]) -> None:
        events: list[tuple[Generation, Event]] = []
        for sequence, event in happened:
            ends = isinstance(event, Completed | Failed)
            generation = self._generations.pop(sequence) if ends else self._generations[sequence]
            events.append((generation, event))
        self._send(events)

    def _check_integrity(self) -> None:
        """Checks the books once each time the engine has been idle for a while, so that it delays nobody."""
        if self._checked:
            return
        self._checked = True
        try:
            self._engine.check_integrity()
        except IntegrityError:
            log.exception("the idle engine's books do not add up")

    def _submit(self, request: GenerationRequest, generation: Generation) -> None:
        try:
            sequence, queued = self._engine.submit(request)
        except Exception as error:
            if not isinstance(error, TriptychError):
                log.exception("a request could not be queued")
                error = TriptychError("internal error; the worker's log has the details")
            self._send([(generation, Failed(error))])
        else:
            generation.sequence = sequence
            self._generations[sequence] = generation
            self._send([(generation, queued)])

    def _cancel(self, generation: Generation) -> None:
        sequence = generation.sequence
        if sequence in self._generations:
            del self._generations[sequence]
            self._engine.cancel(sequence)

    def _stop(self) -> None:
        self._stopped = True

    def _close(self) -> None:
        """Fails what is still here, and what came in last."""
        with self._closing:
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()
        error = Unavailable("the worker's engine has stopped")
        self._send([(generation, Failed(error)) for generation in self._generations.values()])
        self._generations.clear()

    def _send(self, events: list[tuple[Generation, Event]]) -> None:
        if events:
            self._on_loop(partial(_deliver, events))

    def _on_loop(self, callback: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)


def _deliver(events: list[tuple[Generation, Event]]) -> None:
    for generation, event in events:
        generation.deliver(event)


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():  # Done already: its waiter was cancelled.
        future.set_result(value)


def _reject(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
