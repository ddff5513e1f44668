"""The engine's dealings with cached KV: taking it, bringing it up, offering what was computed, measuring all that."""

from collections.abc import Callable, Collection, Iterable, Iterator

from triptych.config import WorkerSettings
from triptych.errors import FeaturesRequired
from triptych.visual_kv import VisualKvPolicy
from triptych.worker.engine.coverage import Look
from triptych.worker.engine.pins import Pins, needed_positions
from triptych.worker.engine.request import TokenizedPrompt
from triptych.worker.engine.restoring import Restorer
from triptych.worker.engine.scheduler import BlockCopy, Chunk, StepPlan
from triptych.worker.engine.sequence import Sequence
from triptych.worker.kv.blocks import BlockPool
from triptych.worker.kv.cache import KVCache
from triptych.worker.kv.hierarchy import Hierarchy, dependents_of
from triptych.worker.kv.identity import BLOCK_TOKENS, BlockIdentity
from triptych.worker.kv.meter import CacheMeter
from triptych.worker.kv.tiers.tier import Usage

# How long a step that has nothing to compute waits for KV that is on its way up, in seconds.
_FETCH_WAIT_S = 0.002


class Reuse:
    """Keeps what was computed for whoever can use it again. Only the engine's thread calls it.

    Attributes:
        hierarchy: The tiers below the device; None where there are none.
        meter: How well the cache serves.
        pins: Blocks that may not be given back.
    """

    def __init__(self, cache: KVCache, pool: BlockPool, hierarchy: Hierarchy | None, settings: WorkerSettings) -> None:
        self._cache, self._pool, self.hierarchy = cache, pool, hierarchy
        self._enabled = settings.prefix_cache
        self._restorer = None if hierarchy is None else Restorer(pool, hierarchy, settings.kv_prefetch_timeout_s)
        self.pins = Pins(pool.size)
        self.meter = CacheMeter()

    def claim(self, sequence: Sequence, others: Collection[Sequence]) -> None:
        """Takes the blocks of images that came without features, or begins to bring them up.

        Raises FeaturesRequired.
        """
        policy, needed = sequence.request.visual_kv, needed_positions(sequence)
        if needed and policy is not VisualKvPolicy.EXACT:
            raise FeaturesRequired(f"visual KV policy {policy.value} needs the features of every image")
        try:
            self._pin(sequence, others)
        except FeaturesRequired:
            if self._restorer is None or self._restorer.covered(sequence) < needed:
                raise
            sequence.needs = needed
            if not self.pins.can_add((), sequence, others):
                raise
            self._restorer.begin(sequence)

    def prepare(
        self, waiting: Iterable[Sequence], running: Iterable[Sequence]
    ) -> Iterator[tuple[Sequence, FeaturesRequired]]:
        """Puts onto the device what has come up for waiting sequences, before they are planned.

        Yields those that cannot be computed after all, because KV of images without features was lost.
        """
        if self._restorer is None or self.hierarchy is None:
            return
        waiting = list(waiting)
        for sequence in self._restorer.tend(waiting):
            try:
                sequence.needs = 0
                self._pin(sequence, [one for one in (*waiting, *running) if one is not sequence])
            except FeaturesRequired as error:
                yield sequence, error
        self.hierarchy.tend(self._pool)

    def is_loading(self, sequence: Sequence) -> bool:
        """Tells whether a waiting sequence should not be planned yet, because its KV is on its way up."""
        return self._restorer is not None and self._restorer.is_loading(sequence)

    def wait(self) -> None:
        """Waits a little when nothing can be computed before some KV has come up."""
        if self._restorer is not None and self._restorer.fetches and self.hierarchy is not None:
            self.hierarchy.wait_for_fetch(_FETCH_WAIT_S)

    def preempt(self, plan: StepPlan) -> None:
        """Sends the KV of those down who are preempted, where bringing it up again is cheaper than computing it."""
        if plan.preempted and self.hierarchy is not None and self.hierarchy.cost.pays("host"):
            # What was set aside goes with its sequence; what it was made of has been in the cache since.
            for sequence in (one for one in plan.preempted if one.aside is None):
                chain = sequence.chain.blocks(sequence.identified)
                self.hierarchy.save(zip(sequence.blocks, chain, strict=False))

    def admit(self, plan: StepPlan, copies: Iterable[BlockCopy]) -> None:
        """Copies what those admitted reuse in part, and counts what they reuse."""
        for copy in copies:
            self._cache.copy(copy.source, copy.target, copy.tokens)
        for admission in plan.admitted:
            sequence = admission.sequence
            self.forget(sequence)
            if not sequence.timeline.chunks:
                sequence.cached_tokens = sequence.computed
                prompt = sequence.request.prompt
                self.meter.note(len(prompt.token_ids), prompt.spans, sequence.computed)

    def offer(self, sequence: Sequence, chunk: Chunk | None) -> None:
        """Makes what was computed reusable: full blocks, and the beginnings of blocks in which an image ends."""
        # What was computed beside KV that was set aside is not, bit for bit, what a cold run computes.
        if not self._enabled or sequence.aside is not None:
            return
        full = sequence.computed // BLOCK_TOKENS
        if full > sequence.identified:
            for index, identity in enumerate(sequence.chain.blocks(full)[sequence.identified :], sequence.identified):
                self._pool.identify(sequence.blocks[index], identity)
            sequence.identified = full
        if chunk is None:
            return
        for index in sequence.chain.part_indices:
            start = index * BLOCK_TOKENS
            if chunk.start < start + BLOCK_TOKENS and start < chunk.end:
                for part in sequence.chain.parts(index):
                    if chunk.start < start + part.tokens <= chunk.end:
                        self._pool.identify(sequence.blocks[index], part)

    def note_cost(self, plan: StepPlan, seconds: float) -> None:
        """Learns what prefill costs from a step that did little else."""
        prefilled = sum(chunk.tokens for chunk in plan.chunks)
        if self.hierarchy is not None and prefilled >= max(BLOCK_TOKENS, 4 * len(plan.decodes)):
            self.hierarchy.cost.note_prefill(prefilled, seconds)

    def discard(self, sequence: Sequence) -> None:
        """Makes sure that numbers which are not finite outlive a sequence nowhere."""
        blocks = sequence.blocks[max(0, sequence.identified - sequence.removed_blocks) :]
        self._pool.forget(blocks)
        self._cache.wipe(blocks)

    def forget(self, sequence: Sequence) -> None:
        """Ends what is under way for a sequence."""
        if self._restorer is not None:
            self._restorer.forget(sequence)

    def look(self, prompt: TokenizedPrompt, cache_salt: str) -> Look:
        """Looks for a prompt on the device and in the worker's own tiers. Takes no reference."""

        def holds(identity: BlockIdentity) -> bool:
            on_device = bool(self._pool.match((identity,)))
            return on_device or (self.hierarchy is not None and self.hierarchy.holds(identity))

        return Look.into(prompt, cache_salt, holds)

    def device_usage(self) -> Usage:
        """Returns what the device's pool holds and did. May be called from any thread: counts may be a step apart."""
        pool, size_bytes = self._pool, self._cache.block_bytes
        counts = {("evict", kind): pool.evictions[kind == "visual"] for kind in ("text", "visual")}
        counts |= {("hit", kind): pool.hits[kind == "visual"] for kind in ("text", "visual")}
        text, visual = pool.held(visual=False), pool.held(visual=True)
        return Usage(text * size_bytes, visual * size_bytes, pool.size * size_bytes, text + visual, counts)

    def image_bytes(self) -> dict[bytes, dict[str, int]]:
        """Returns, for each image with blocks in a tier that knows, their bytes there, by the tier's name."""
        found = {} if self.hierarchy is None else self.hierarchy.image_bytes()
        for identities in self._pool.identities():
            for image in {image for identity in identities for image in identity.images}:
                tiers = found.setdefault(image, {})
                tiers["device"] = tiers.get("device", 0) + self._cache.block_bytes
        return found

    def dependents(self, image: bytes) -> Callable[[BlockIdentity], bool]:
        """Returns what tells the blocks of an image, and those computed behind them, as far as they are known."""
        known = [identity for identities in self._pool.identities() for identity in identities]
        if self.hierarchy is not None:
            known += self.hierarchy.identities()
        return dependents_of(image, known)

    def drop_from_device(self, doomed: Callable[[BlockIdentity], bool]) -> int:
        """Forgets blocks; those that requests hold stay with these and are found by nobody else. Returns how many."""
        return self._pool.drop(doomed)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless all tiers are sound and hold nothing for requests that are gone."""
        if self.hierarchy is not None and self._restorer is not None:
            self.hierarchy.check_integrity(self._restorer.fetches)

    def close(self, timeout_s: float) -> None:
        """Saves the KV that should outlive the engine, as far as the time allows."""
        if self.hierarchy is not None:
            for block, identities in self._pool.oldest_cached():
                self.hierarchy.save((block, identity) for identity in identities)
            self.hierarchy.close(timeout_s)

    def _pin(self, sequence: Sequence, others: Collection[Sequence]) -> None:
        copy = self.pins.pin(sequence, self._pool, others)
        if copy is not None:
            self._cache.copy(copy.source, copy.target, copy.tokens)
