"""Whether the engine's books add up."""

from collections import Counter

from triptych.errors import IntegrityError
from triptych.worker.engine.pins import Pins
from triptych.worker.engine.queue import AgingQueue
from triptych.worker.engine.sequence import Phase
from triptych.worker.kv.blocks import BlockPool
from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.kv.visual import VisualKv


def check_books(pool: BlockPool, waiting: AgingQueue, running: AgingQueue, pins: Pins, visual_kv: VisualKv) -> None:
    """Raises IntegrityError unless pool, queues and sequences agree, and nothing is held when there is no work."""
    pool.check_integrity()
    waiting.check_integrity()
    running.check_integrity()
    sequences = [*waiting, *running]
    pins.check_integrity(sequences)
    asides = [sequence.aside for sequence in sequences if sequence.aside is not None]
    visual_kv.check_integrity(asides)
    held = Counter(block for sequence in sequences for block in sequence.blocks)
    held.update(block for aside in asides for block in aside.device_blocks)
    if any(pool.references(block) != held[block] for block in range(pool.size)):
        raise IntegrityError("references to KV blocks and the sequences' block tables differ")
    for sequence in waiting:
        if sequence.phase is not Phase.WAITING or len(sequence.blocks) != sequence.pinned:
            raise IntegrityError("a waiting sequence holds more than its pinned blocks")
    for sequence in running:
        if sequence.phase not in (Phase.PREFILL, Phase.DECODE) or sequence.pending <= 0:
            raise IntegrityError("a running sequence has nothing to do")
        if sequence.computed > (len(sequence.blocks) + sequence.removed_blocks) * BLOCK_TOKENS:
            raise IntegrityError("a sequence has fewer blocks than its computed tokens need")
