"""The engine: takes requests, runs steps, tells what came out. Synchronous and single-threaded."""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.config import WorkerSettings
from triptych.errors import FeaturesRequired, IntegrityError, InvalidRequest, Overloaded, TriptychError
from triptych.worker.detokenizer import TextStream, TokenDecoder
from triptych.worker.engine.budget import TokenBudget
from triptych.worker.engine.events import Completed, Event, Failed, Load, Queued, Text, Usage
from triptych.worker.engine.logprobs import TokenLogprobs, spell, within
from triptych.worker.engine.pins import Pins
from triptych.worker.engine.queue import AgingQueue
from triptych.worker.engine.request import FinishReason, GenerationRequest, TokenizedPrompt
from triptych.worker.engine.runner import Outcome, Runner
from triptych.worker.engine.sampler import TokenChooser
from triptych.worker.engine.scheduler import Chunk, StepPlan, commit, plan_step, release_blocks
from triptych.worker.engine.sequence import Phase, Rank, Sequence
from triptych.worker.engine.timeline import ChunkRecord
from triptych.worker.kv.blocks import BlockPool, blocks_for
from triptych.worker.kv.identity import BLOCK_TOKENS, identify_block, root_key

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the prefix cache holds of a prompt: leading tokens, and whether each image is among them."""

    cached_tokens: int
    images: tuple[bool, ...]


class Engine:
    """Continuous batching over one decoder.

    A sequence waits, runs, or has ended; that changes only in `submit`, `cancel`, `abort` and `step`, which must all be
    called from one thread.

    Attributes:
        runner: What computes its plans.
        context_tokens: Most prompt and output tokens together: the model's context or the pool, whichever is smaller.
        computed_tokens: Tokens computed since the start; it grows as long as there is work and all is well.
    """

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        text_decoder: TokenDecoder,
        end_token_ids: frozenset[int],
        settings: WorkerSettings,
        image_token_id: int | None = None,
    ) -> None:
        self._image_token_id = image_token_id
        self.runner = runner
        self._pool = pool
        self._text_decoder = text_decoder
        self._end_token_ids = end_token_ids
        self._settings = settings
        self._budget = TokenBudget.of(settings.step_token_budget, settings.max_running, settings.speculative_tokens)
        self._waiting = AgingQueue()
        self._running = AgingQueue()
        self._pins = Pins(pool.size)
        self._serials = itertools.count()
        model_tokens, pool_tokens = runner.config.context_tokens, pool.size * BLOCK_TOKENS
        self.computed_tokens = 0
        self.context_tokens = min(model_tokens, pool_tokens)
        self._context_knob = "kv_blocks or kv_cache_bytes" if pool_tokens < model_tokens else "the model's context"

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def submit(self, request: GenerationRequest) -> tuple[Sequence, Queued]:
        """Queues a request. Returns its sequence, which is its handle in `cancel` and in the events of `step`.

        Raises InvalidRequest (PROMPT_TOO_LONG) when it could never run, Overloaded when the queue is full and
        FeaturesRequired when an image came without features and its KV is not cached. References to KV that cannot be
        computed again are taken here, so that it cannot be lost afterwards.
        """
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
        self._pin(sequence)
        self._waiting.add(sequence)
        return sequence, Queued(len(prompt.token_ids))

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence without an event and frees all it holds; does nothing if it has ended."""
        if sequence.phase is not Phase.ENDED:
            self._end(sequence)

    def abort(self, error: TriptychError) -> list[tuple[Sequence, Event]]:
        """Ends every sequence with an error."""
        return [self._fail(sequence, error) for sequence in (*self._waiting, *self._running)]

    def step(self) -> list[tuple[Sequence, Event]]:
        """Runs one step: some tokens of every running sequence. Returns what happened, in order.

        Errors of the step become Failed events of the sequences that took part; only a broken plan is raised.
        """
        plan = plan_step(self._waiting, self._running, self._budget, self._pool)
        commit(plan, self._waiting, self._running, self._pool)
        for admission in plan.admitted:
            if not admission.sequence.timeline.chunks:
                admission.sequence.cached_tokens = admission.sequence.computed
        if not plan.tokens:
            return []
        start_ns = time.time_ns()
        try:
            outcomes = self.runner.run(plan)
        except Exception as error:
            log.exception("a step of %d sequences failed", len(plan.decodes) + len(plan.chunks))
            return [self._fail(sequence, _internal(error)) for sequence in plan.sequences()]
        self.computed_tokens += plan.tokens
        return list(self._postprocess(plan, outcomes, start_ns))

    def coverage(self, prompt: TokenizedPrompt, cache_salt: str) -> Coverage:
        """Tells what the prefix cache holds of a prompt now. Takes no reference."""
        key = root_key(cache_salt)
        cached_tokens = 0
        while cached_tokens + BLOCK_TOKENS < len(prompt.token_ids):
            identity = identify_block(key, prompt.token_ids, prompt.spans, cached_tokens)
            if not self._pool.match((identity,)):
                break
            key = identity.key
            cached_tokens += BLOCK_TOKENS
        return Coverage(cached_tokens, tuple(span.end <= cached_tokens for span in prompt.spans))

    def load(self) -> Load:
        """Returns the engine's state as counts."""
        pool = self._pool
        return Load(len(self._waiting), len(self._running), pool.size, pool.owned, pool.cached)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless pool, queues and sequences agree, and nothing is held when there is no work."""
        self._pool.check_integrity()
        self._waiting.check_integrity()
        self._running.check_integrity()
        sequences = [*self._waiting, *self._running]
        self._pins.check_integrity(sequences)
        held = Counter(block for sequence in sequences for block in sequence.blocks)
        if any(self._pool.references(block) != held[block] for block in range(self._pool.size)):
            raise IntegrityError("references to KV blocks and the sequences' block tables differ")
        for sequence in self._waiting:
            if sequence.phase is not Phase.WAITING or len(sequence.blocks) != sequence.pinned:
                raise IntegrityError("a waiting sequence holds more than its pinned blocks")
        for sequence in self._running:
            if sequence.phase not in (Phase.PREFILL, Phase.DECODE) or sequence.pending <= 0:
                raise IntegrityError("a running sequence has nothing to do")
            if sequence.computed > len(sequence.blocks) * BLOCK_TOKENS:
                raise IntegrityError("a sequence has fewer blocks than its computed tokens need")

    def _pin(self, sequence: Sequence) -> None:
        """Takes the blocks of images that came without features. Raises FeaturesRequired."""
        request = sequence.request
        spans = zip(request.prompt.spans, request.features, strict=True)
        needed = max((span.end for span, features in spans if features is None), default=0)
        if not needed:
            return
        blocks = self._pool.match(sequence.reusable_chain())[: blocks_for(needed)]
        if len(blocks) * BLOCK_TOKENS < needed:
            raise FeaturesRequired("the KV of an image without features is not cached; send the request with features")
        if not self._pins.can_add(blocks, (*self._waiting, *self._running, sequence)):
            raise FeaturesRequired("too little KV memory to hold an image without features; send it with features")
        for block in blocks:
            self._pool.acquire(block)
        self._pins.add(blocks)
        sequence.blocks = list(blocks)
        sequence.pinned = sequence.identified = len(blocks)
        sequence.computed = len(blocks) * BLOCK_TOKENS

    def _postprocess(self, plan: StepPlan, outcomes: list[Outcome], start_ns: int) -> Iterator[tuple[Sequence, Event]]:
        now_ns = time.time_ns()
        chunks = {chunk.sequence: chunk for chunk in plan.chunks}
        for sequence, outcome in zip(plan.sequences(), outcomes, strict=True):
            chunk = chunks.get(sequence)
            try:
                if not outcome.finite:
                    yield self._discard(sequence)
                    continue
                self._advance(sequence, chunk, start_ns, now_ns)
                for index, (token, logprobs) in enumerate(zip(outcome.tokens, outcome.logprobs, strict=True)):
                    if index:
                        sequence.computed += 1  # The token before was guessed right: its KV is there.
                    for event in self._take_token(sequence, token, logprobs, now_ns):
                        yield sequence, event
                    if sequence.phase is Phase.ENDED:
                        break
            except Exception as error:
                log.exception("a sequence failed")
                yield self._fail(sequence, _internal(error))

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
        full = sequence.computed // BLOCK_TOKENS
        if self._settings.prefix_cache and full > sequence.identified:
            for index, identity in enumerate(sequence.chain(full)[sequence.identified :], sequence.identified):
                self._pool.identify(sequence.blocks[index], identity)
            sequence.identified = full

    def _take_token(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now_ns: int
    ) -> Iterator[Event]:
        """Appends a token, and tells the text and the end it may bring."""
        stopping = sequence.request.stopping
        previous = sequence.token_ids[-1]
        sequence.token_ids.append(token)
        sequence.chooser.note(token)
        sequence.timeline.token_at(now_ns)
        sequence.unsent_tokens += 1
        reason = None
        if token in self._end_token_ids and not stopping.ignore_eos:
            reason, text = FinishReason.END, ""
        else:
            if logprobs is not None:
                sequence.unsent_choices.append(spell(logprobs, previous, self._text_decoder))
            piece = sequence.text.push(token)
            text = piece.text
            if piece.stopped:
                reason = FinishReason.STOP
            elif sequence.output_tokens >= stopping.max_tokens:
                reason = FinishReason.LENGTH
        if reason in (FinishReason.END, FinishReason.LENGTH):
            piece = sequence.text.finish()
            text += piece.text
            reason = FinishReason.STOP if piece.stopped else reason
        if text:
            choices = sequence.unsent_choices
            sent = within(choices, text) if reason is FinishReason.STOP else tuple(choices)
            yield Text(text, sequence.unsent_tokens, sent)
            sequence.unsent_tokens = 0
            choices.clear()
        if reason is not None:
            self._end(sequence)
            yield Completed(reason, _usage(sequence), sequence.timeline)

    def _discard(self, sequence: Sequence) -> tuple[Sequence, Event]:
        """Fails a sequence whose numbers are not finite, and lets none of them outlive it."""
        self.runner.cache.wipe(sequence.blocks[sequence.identified :])
        log.error("numbers are not finite; the request failed")
        return self._fail(
            sequence, TriptychError("the model's numbers are not finite for this request", reason="NOT_FINITE")
        )

    def _fail(self, sequence: Sequence, error: TriptychError) -> tuple[Sequence, Event]:
        self.cancel(sequence)
        return sequence, Failed(error, sequence.timeline)

    def _end(self, sequence: Sequence) -> None:
        """Takes a sequence out of its queue and gives back its blocks."""
        (self._waiting if sequence.phase is Phase.WAITING else self._running).remove(sequence)
        sequence.phase = Phase.ENDED
        self._pins.remove(sequence.blocks[: sequence.pinned])
        sequence.pinned = 0
        release_blocks(sequence, self._pool)


def _usage(sequence: Sequence) -> Usage:
    prompt = sequence.request.prompt
    visual = prompt.visual_tokens
    return Usage(len(prompt.token_ids) - visual, visual, sequence.cached_tokens, sequence.output_tokens)


def _internal(error: Exception) -> TriptychError:
    if isinstance(error, TriptychError):
        return error
    return TriptychError(f"internal error ({type(error).__name__}); the worker's log has the details")
