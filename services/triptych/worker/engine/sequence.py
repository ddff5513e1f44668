"""The state of one request in the engine."""

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from triptych.visual_kv import VisualKvPolicy
from triptych.worker.detokenizer import TextStream
from triptych.worker.engine.logprobs import TokenChoice
from triptych.worker.engine.request import GenerationRequest
from triptych.worker.engine.sampler import TokenChooser
from triptych.worker.engine.speculation import Guesser, Guesses
from triptych.worker.engine.timeline import Timeline
from triptych.worker.kv.blocks import blocks_for
from triptych.worker.kv.chain import Chain
from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.kv.visual import Aside


class Phase(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Place in every queue; lower goes first.

    Attributes:
        due_s: Arrival plus `max_wait_s` for each class below the first. After waiting that long, a request ranks with
            those of the next higher class that arrive now, so nobody is overtaken for ever.
        serial: Order of arrival; no two sequences share one.
    """

    due_s: float
    serial: int


class Sequence:
    """One request: its tokens, its blocks and how far it is computed. Only the engine's thread touches it.

    Attributes:
        request: What was asked.
        rank: Place in every queue.
        phase: Where it stands.
        token_ids: Prompt and output.
        computed: Leading positions whose KV is in `blocks`.
        blocks: The block table. While waiting, only the pinned blocks.
        needs: Leading positions that hold images which came without features, as long as their KV is on its way up.
        overtaken: How often others were admitted before it although it came first.
        chain: What its blocks are found by in the cache.
        pinned: Leading blocks that stay referenced until the end, because nothing could compute them again: they hold
            images that came without features.
        identified: Leading blocks that were offered to the prefix cache or came from it.
        cached_tokens: Prompt positions that came from the prefix cache when it was first admitted.
        chooser: Chooses its tokens.
        guesser: Guesses the next of them; asked only where the settings want that.
        text: Turns its tokens into text.
        unsent_tokens: Tokens not yet accounted for by a chunk of text.
        aside: Its visual KV, where that is not in `blocks` any more.
        visual_kv: Policy under which tokens were chosen so far; EXACT until one takes effect.
        saved_bytes: Device memory that it saved, at most.
        unsent_choices: How likely these were, if the request asks for that.
        timeline: When its stages happened.
    """

    def __init__(
        self,
        request: GenerationRequest,
        rank: Rank,
        chooser: TokenChooser,
        text: TextStream,
        image_token_id: int | None = None,
    ) -> None:
        self.request = request
        self.rank = rank
        self.phase = Phase.WAITING
        self.token_ids = list(request.prompt.token_ids)
        self.chain = Chain(self.token_ids, request.prompt.spans, request.cache_salt)
        self.computed = 0
        self.blocks: list[int] = []
        self.needs = 0
        self.overtaken = 0
        self.pinned = 0
        self.identified = 0
        self.cached_tokens = 0
        self.chooser = chooser
        self.guesser: Guesses = Guesser(image_token_id)
        self.text = text
        self.aside: Aside | None = None
        self.visual_kv = VisualKvPolicy.EXACT
        self.saved_bytes = 0
        self.unsent_tokens = 0
        self.unsent_choices: list[TokenChoice] = []
        self.timeline = Timeline(request.arrival_ns)

    @property
    def pending(self) -> int:
        """Positions whose KV is not computed; the last one's logits give the next token."""
        return len(self.token_ids) - self.computed

    @property
    def removed_blocks(self) -> int:
        """Blocks that its table lacks because their KV was set aside; all of them hold leading positions."""
        return self.aside.removed if self.aside else 0

    @property
    def missing_blocks(self) -> int:
        """Blocks that its known tokens need and its table lacks."""
        return blocks_for(len(self.token_ids)) - len(self.blocks) - self.removed_blocks

    @property
    def releasable_blocks(self) -> list[int]:
        """Blocks of the device that it gives back when it is preempted."""
        return [*self.blocks[self.pinned :], *(self.aside.device_blocks if self.aside else ())]

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt.token_ids)

    @property
    def most_tokens(self) -> int:
        """Positions it takes if it generates all it may."""
        return len(self.request.prompt.token_ids) + self.request.stopping.max_tokens

    @property
    def holds_part(self) -> bool:
        """Whether its last block is computed in part; only pinned blocks of a waiting sequence may be."""
        return self.computed < len(self.blocks) * BLOCK_TOKENS

    def is_visual_block(self, index: int) -> bool:
        """Tells whether at least half of a block's positions belong to images."""
        start = index * BLOCK_TOKENS
        return 2 * self.visual_tokens_between(start, start + BLOCK_TOKENS) >= BLOCK_TOKENS

    def visual_tokens_between(self, start: int, end: int) -> int:
        """Returns how many positions of a range are visual."""
        return sum(max(0, min(end, span.end) - max(start, span.start)) for span in self.request.prompt.spans)

    def features_between(self, start: int, end: int) -> list[tuple[int, Tensor]]:
        """Returns the features of a range's visual positions, as (position, features [rows, hidden])."""
        found: list[tuple[int, Tensor]] = []
        for span, features in zip(self.request.prompt.spans, self.request.features, strict=True):
            first, last = max(start, span.start), min(end, span.end)
            if first < last and features is not None:
                found.append((first, features[first - span.start : last - span.start]))
        return found
