"""The engine: takes requests, runs steps, tells what came out. Single-threaded: only arithmetic runs elsewhere."""

import itertools
import logging
import time
from collections import deque
from collections.abc import Collection

from triptych.config import WorkerSettings
from triptych.errors import InvalidRequest, Overloaded, TriptychError
from triptych.worker.detokenizer import TextStream, TokenDecoder
from triptych.worker.engine.budget import TokenBudget
from triptych.worker.engine.computing import Computing
from triptych.worker.engine.coverage import Coverage
from triptych.worker.engine.draft_model import DraftModel
from triptych.worker.engine.events import Completed, Event, Failed, Load, Queued
from triptych.worker.engine.integrity import check_books
from triptych.worker.engine.logprobs import TokenLogprobs
from triptych.worker.engine.queue import AgingQueue
from triptych.worker.engine.request import FinishReason, GenerationRequest, TokenizedPrompt
from triptych.worker.engine.reuse import Reuse
from triptych.worker.engine.runner import Outcome, Runner
from triptych.worker.engine.sampler import TokenChooser
from triptych.worker.engine.scheduler import Chunk, StepPlan, commit, plan_step, release_blocks
from triptych.worker.engine.sequence import Phase, Rank, Sequence
from triptych.worker.engine.telling import Taken, tell
from triptych.worker.engine.timeline import ChunkRecord
from triptych.worker.kv.blocks import BlockPool
from triptych.worker.kv.hierarchy import Hierarchy
from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.kv.visual import VisualKv

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one decoder.

    A step is `start` and `finish`. What does not depend on its tokens belongs between them, while it computes: `tell`,
    which makes text of the tokens of the step before, `submit` and `cancel`. All are called from one thread.

    A sequence waits, runs, or has ended; that changes only in `submit`, `cancel`, `abort`, `start` and `finish`.

    Attributes:
        runner: What computes its plans.
        context_tokens: Most prompt and output tokens together: the model's context or the pool, whichever is smaller.
        reuse: What it does with cached KV.
        computed_tokens: Tokens computed since the start; it grows as long as there is work and all is well.
        guessed_tokens: How many of them were guesses.
        confirmed_tokens: How many of these were right and used.
    """

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        visual_kv: VisualKv,
        text_decoder: TokenDecoder,
        end_token_ids: frozenset[int],
        settings: WorkerSettings,
        image_token_id: int | None = None,
        draft_model: DraftModel | None = None,
        hierarchy: Hierarchy | None = None,
    ) -> None:
        """Makes an idle engine.

        `draft_model` guesses tokens; None: they are guessed from earlier text, if at all. `hierarchy` is what `pool`
        tells of its blocks; None: no KV outlives the device's memory.
        """
        self._image_token_id = image_token_id
        self.runner = runner
        self._pool = pool
        self._draft_model = draft_model
        self._visual_kv = visual_kv
        self._text_decoder = text_decoder
        self._end_token_ids = end_token_ids
        self._settings = settings
        self._budget = TokenBudget.of(settings.step_token_budget, settings.max_running, settings.speculative_tokens)
        self._waiting = AgingQueue()
        self._running = AgingQueue()
        self.reuse = Reuse(runner.cache, pool, hierarchy, settings)
        self._serials = itertools.count()
        self._computing: Computing | None = None
        self._news: deque[tuple[Sequence, Taken | Event]] = deque()  # What happened and is not told.
        model_tokens, pool_tokens = runner.config.context_tokens, pool.size * BLOCK_TOKENS
        self.computed_tokens = self.guessed_tokens = self.confirmed_tokens = 0
        self.context_tokens = min(model_tokens, pool_tokens)
        self._context_knob = "kv_blocks or kv_cache_bytes" if pool_tokens < model_tokens else "the model's context"

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, or has something to tell."""
        return bool(self._waiting or self._running or self._news)

    def submit(self, request: GenerationRequest) -> tuple[Sequence, Queued]:
        """Queues a request. Returns its sequence, which is its handle in `cancel` and in the events of `step`.

        Raises InvalidRequest (PROMPT_TOO_LONG, VISUAL_KV_UNAVAILABLE) when it could never run, Overloaded when the
        queue is full and FeaturesRequired when an image came without features and its KV is not cached, or is to be
        set aside. References to KV that cannot be computed again are taken here, so that it cannot be lost afterwards;
        where it has to come up from a tier first, the request may still fail with FeaturesRequired before its first
        token.
        """
        self._visual_kv.check(request.visual_kv)
        prompt = request.prompt
        needed = len(prompt.token_ids) + request.stopping.max_tokens
        if needed > self.context_tokens:
            raise InvalidRequest(
                f"{len(prompt.token_ids)} prompt tokens and max_tokens={request.stopping.max_tokens} exceed the limit "
                f"of {self.context_tokens} tokens, set by {self._context_knob}",
                reason="PROMPT_TOO_LONG",
            )
        if len(self._waiting) >= self._settings.max_waiting:
            raise Overloaded(f"max_waiting={self._settings.max_waiting} requests are queued; try again later")
        runner = self.runner
        chooser = TokenChooser(request.sampling, prompt.token_ids, runner.config.vocabulary, runner.device)
        text = TextStream(self._text_decoder, request.stopping.stop)
        due_s = time.monotonic() + request.priority * self._settings.max_wait_s
        sequence = Sequence(request, Rank(due_s, next(self._serials)), chooser, text, self._image_token_id)
        sequence.chain.reusable()  # Hashed here and kept: a step may be computing, and planning the next one is not.
        self.reuse.claim(sequence, (*self._waiting, *self._running))
        self._waiting.add(sequence)
        return sequence, Queued(len(prompt.token_ids))

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence without an event and frees all it holds, at once or with the step that computes it now."""
        for news in [news for news in self._news if news[0] is sequence]:
            self._news.remove(news)
        if self._computing is not None and sequence in self._computing.sequences:
            self._computing.cancelled.add(sequence)
        elif sequence.phase is not Phase.ENDED:
            self._end(sequence)

    def abort(self, error: TriptychError) -> list[tuple[Sequence, Event]]:
        """Ends every sequence with an error."""
        return [self._fail(sequence, error) for sequence in (*self._waiting, *self._running)]

    def step(self) -> list[tuple[Sequence, Event]]:
        """Runs one step from its plan to its events. Returns what happened, in order."""
        self.start()
        self.finish()
        return self.tell()

    def start(self) -> None:
        """Plans a step, some tokens of every running sequence, and begins to compute it.

        Until `finish`, everything else may be called but `start`. Errors of the step become Failed events of the
        sequences that take part; only a broken plan is raised.
        """
        self._set_visual_kv_aside()
        if self._draft_model is not None:
            self._draft_model.propose(self._running, self._budget)
        for sequence, lost in self.reuse.prepare(self._waiting, self._running):
            self._news.append(self._fail(sequence, lost))
        plan = plan_step(self._waiting, self._running, self._budget, self._pool, self.reuse.is_loading)
        self.reuse.preempt(plan)
        self.reuse.admit(plan, commit(plan, self._waiting, self._running, self._pool))
        if not plan.tokens:
            self.reuse.wait()
            return
        start_ns = time.time_ns()
        try:
            self._computing = Computing(plan, start_ns, self.runner.start(plan), frozenset(plan.sequences()))
        except Exception as error:
            self._fail_step(plan, error)

    def finish(self) -> None:
        """Waits for the step that has begun, if one has, and takes its tokens."""
        step, self._computing = self._computing, None
        if step is None:
            return
        try:
            outcomes = step.outcomes()
        except Exception as error:
            self._fail_step(step.plan, error, step.cancelled)
            return
        self.computed_tokens += step.plan.tokens
        self.guessed_tokens += sum(map(len, step.plan.guesses))
        now_ns = time.time_ns()
        self.reuse.note_cost(step.plan, (now_ns - step.start_ns) / 1e9)
        chunks = {chunk.sequence: chunk for chunk in step.plan.chunks}
        for sequence, outcome in zip(step.plan.sequences(), outcomes, strict=True):
            try:
                if not outcome.finite:
                    self._discard(sequence)
                elif sequence not in step.cancelled:
                    self._take_all(sequence, chunks.get(sequence), outcome, step.start_ns, now_ns)
            except Exception as error:
                log.exception("a sequence failed")
                self._news.append(self._fail(sequence, _internal(error)))
        for sequence in step.cancelled:
            self.cancel(sequence)

    def tell(self) -> list[tuple[Sequence, Event]]:
        """Returns what happened since the last call, in order. Turns tokens into text, best while a step computes."""
        told: list[tuple[Sequence, Event]] = []
        while self._news:
            sequence, news = self._news.popleft()
            if not isinstance(news, Taken):
                told.append((sequence, news))
                continue
            try:
                told += ((sequence, event) for event in tell(sequence, news, self._text_decoder))
            except Exception as error:
                log.exception("a sequence failed")
                told.append(self._fail(sequence, _internal(error)))
        return told

    def coverage(self, prompt: TokenizedPrompt, cache_salt: str) -> Coverage:
        """Tells what the worker's KV cache holds of a prompt now. Takes no reference."""
        return self.reuse.look(prompt, cache_salt).coverage

    def load(self) -> Load:
        """Returns the engine's state as counts."""
        pool = self._pool
        return Load(len(self._waiting), len(self._running), pool.size, pool.owned, pool.cached)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless pool, queues and sequences agree, and nothing is held when there is no work."""
        check_books(self._pool, self._waiting, self._running, self.reuse.pins, self._visual_kv)
        self.reuse.check_integrity()
        if self._draft_model is not None:
            self._draft_model.check_integrity((*self._waiting, *self._running))

    def close(self, timeout_s: float = 10.0) -> None:
        """Saves the KV that should outlive the engine, as far as the time allows. Nothing may be called afterwards."""
        self.reuse.close(timeout_s)

    def _set_visual_kv_aside(self) -> None:
        """Applies the policies of sequences whose prompt is computed, where there is room for it by now."""
        for sequence in list(self._running):
            if sequence.phase is not Phase.DECODE or sequence.aside is not None:
                continue
            request = sequence.request
            try:
                aside = self._visual_kv.set_aside(sequence.blocks, request.prompt.spans, request.visual_kv)
            except Exception as error:
                log.exception("visual KV could not be set aside")
                self._news.append(self._fail(sequence, _internal(error)))
                continue
            if aside is not None:
                sequence.aside = aside
                sequence.visual_kv = aside.policy
                sequence.saved_bytes = max(sequence.saved_bytes, aside.saved_bytes)

    def _take_all(self, sequence: Sequence, chunk: Chunk | None, outcome: Outcome, start_ns: int, now_ns: int) -> None:
        """Notes what a step computed for a sequence, and takes its tokens."""
        self._advance(sequence, chunk, start_ns, now_ns)
        for index, (token, logprobs) in enumerate(zip(outcome.tokens, outcome.logprobs, strict=True)):
            if index:
                sequence.computed += 1  # The token before was guessed right: its KV is there.
                self.confirmed_tokens += 1
            self._take(sequence, token, logprobs, now_ns)
            if sequence.phase is Phase.ENDED:
                break

    def _advance(self, sequence: Sequence, chunk: Chunk | None, start_ns: int, now_ns: int) -> None:
        """Notes that positions were computed, and offers the blocks they filled to the prefix cache."""
        if chunk is None:
            sequence.computed += 1
        else:
            first = not sequence.timeline.chunks
            visual_tokens = sequence.visual_tokens_between(chunk.start, chunk.end)
            cached_tokens = sequence.cached_tokens if first else 0
            sequence.timeline.chunks.append(ChunkRecord(start_ns, now_ns, chunk.tokens, visual_tokens, cached_tokens))
            sequence.computed = chunk.end
            if chunk.completes:
                sequence.phase = Phase.DECODE
        self.reuse.offer(sequence, chunk)

    def _take(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now_ns: int) -> None:
        """Appends a token, and ends the sequence where it must."""
        stopping = sequence.request.stopping
        previous = sequence.token_ids[-1]
        sequence.token_ids.append(token)
        sequence.chooser.note(token)
        sequence.timeline.token_at(now_ns)
        reason = None
        if token in self._end_token_ids and not stopping.ignore_eos:
            reason = FinishReason.END
        elif sequence.output_tokens >= stopping.max_tokens:
            reason = FinishReason.LENGTH
        taken = Taken(token, previous, logprobs, reason)
        if stopping.stop:  # Whether it goes on depends on its text, which can otherwise wait.
            events = tell(sequence, taken, self._text_decoder)
            self._news += ((sequence, event) for event in events)
            ends = any(isinstance(event, Completed) for event in events)
        else:
            self._news.append((sequence, taken))
            ends = reason is not None
        if ends:
            self._end(sequence)

    def _discard(self, sequence: Sequence) -> None:
        """Fails a sequence whose numbers are not finite, and lets none of them outlive it."""
        self.reuse.discard(sequence)
        if sequence.aside is not None:
            self._visual_kv.wipe(sequence.aside)
        log.error("numbers are not finite; the request failed")
        error = TriptychError("the model's numbers are not finite for this request", reason="NOT_FINITE")
        self._news.append(self._fail(sequence, error))

    def _fail_step(self, plan: StepPlan, error: Exception, cancelled: Collection[Sequence] = ()) -> None:
        """Fails all whom a step would have computed, and ends those who were cancelled meanwhile."""
        log.exception("a step of %d sequences failed", len(plan.decodes) + len(plan.chunks))
        for sequence in plan.sequences():
            failed = self._fail(sequence, _internal(error))
            if sequence not in cancelled:
                self._news.append(failed)

    def _fail(self, sequence: Sequence, error: TriptychError) -> tuple[Sequence, Event]:
        self.cancel(sequence)
        return sequence, Failed(error, sequence.timeline)

    def _end(self, sequence: Sequence) -> None:
        """Takes a sequence out of its queue and gives back its blocks."""
        (self._waiting if sequence.phase is Phase.WAITING else self._running).remove(sequence)
        sequence.phase = Phase.ENDED
        if self._draft_model is not None:
            self._draft_model.forget(sequence)
        self.reuse.pins.remove(sequence.blocks[: sequence.pinned])
        self.reuse.forget(sequence)
        sequence.pinned = 0
        release_blocks(sequence, self._pool)


def _internal(error: Exception) -> TriptychError:
    if isinstance(error, TriptychError):
        return error
    return TriptychError(f"internal error ({type(error).__name__}); the worker's log has the details")
