"""Many dialogues about pictures in a device pool that holds few of them: tiers against computing all again.

In process, without encoder and network: features are random, and a hit saves prefill only. What a router would save
in front of it comes on top.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from triptych.config import WorkerSettings
from triptych.worker.engine.request import GenerationRequest, StoppingOptions
from triptych.worker.kv.blocks import blocks_for
from triptych.worker.kv.identity import BLOCK_TOKENS
from triptych.worker.loading import LoadedModel, load_model
from triptych.worker.prompt import ImageSlot, Turn

VISUAL_TOKENS = 576

_ANSWER_TOKENS = 4
_QUESTION = "what is in the picture, and what is behind it?"


@dataclass(frozen=True, slots=True)
class Capacity:
    """How the dialogues went.

    Attributes:
        dialogues: How many there were.
        turns: Times each was visited.
        hit_rate: Of the tokens that an earlier turn had computed, the share that came from the cache.
        tiered_s: Seconds for all turns with tiers.
        recompute_s: Seconds for the same turns without any cache.
        bytes_by_tier: What the tiers held at the end.
    """

    dialogues: int
    turns: int
    hit_rate: float
    tiered_s: float
    recompute_s: float
    bytes_by_tier: dict[str, int]


def measure_capacity(
    model_dir: Path, dialogues: int, on_device: int, turns: int, say: Callable[[str], None] = lambda text: None
) -> Capacity:
    """Visits `dialogues` round robin, `turns` times each, with device KV for `on_device` of them.

    A third of the dialogues fits into host memory, all of them on disk. Raises what `load_model` does.
    """
    # Each turn adds a question and an answer.
    tokens = VISUAL_TOKENS + turns * (64 + _ANSWER_TOKENS)
    blocks = blocks_for(tokens) + 1
    with tempfile.TemporaryDirectory() as scratch:
        base = {"model_dir": model_dir, "dtype": "bfloat16", "device": "cpu", "kv_blocks": on_device * blocks}
        probe = load_model(WorkerSettings.model_validate({**base, "kv_host_bytes": 0}))
        dialogue_bytes = blocks * probe.engine.runner.cache.block_bytes
        del probe
        tiers = {
            "kv_host_bytes": max(dialogues // 3, 4) * dialogue_bytes,
            "kv_disk_dir": scratch,
            "kv_disk_bytes": 2 * dialogues * dialogue_bytes,
            "kv_prefetch_timeout_s": 10.0,
        }
        tiered = load_model(WorkerSettings.model_validate({**base, **tiers}))
        visit = _Visitor(tiered, lambda text: say(f"tiers, {text}"))
        tiered_s = visit.all(dialogues, turns)
        hierarchy = tiered.engine.reuse.hierarchy
        assert hierarchy is not None
        held = {name: usage.text_bytes + usage.visual_bytes for name, usage in hierarchy.usages().items()}
        hit_rate = visit.found / visit.seen
        tiered.engine.check_integrity()
        tiered.engine.close()
        del tiered, hierarchy
    plain = load_model(WorkerSettings.model_validate({**base, "prefix_cache": False}))
    recompute = _Visitor(plain, lambda text: say(f"recompute, {text}"))
    recompute_s = recompute.all(dialogues, turns)
    if recompute.answers != visit.answers:
        raise AssertionError("answers with tiers differ from those without")
    return Capacity(dialogues, turns, hit_rate, tiered_s, recompute_s, held)


class _Visitor:
    """Goes round the dialogues.

    Attributes:
        answers: Token ids of every answer, by dialogue and turn.
        seen: Tokens of prompts that an earlier turn had computed.
        found: Those among them that came from the cache.
    """

    def __init__(self, model: LoadedModel, say: Callable[[str], None]) -> None:
        self._model, self._say = model, say
        self._turns: dict[int, list[Turn]] = {}
        self._computed: dict[int, int] = {}
        self.answers: dict[tuple[int, int], list[int]] = {}
        self.seen = self.found = 0

    def all(self, dialogues: int, turns: int) -> float:
        """Visits each dialogue `turns` times. Returns the engine's seconds."""
        seconds = 0.0
        for turn in range(turns):
            for number in range(dialogues):
                if number % 10 == 0:
                    self._say(f"turn {turn + 1} of {turns}, dialogue {number + 1} of {dialogues}")
                seconds += self._visit(number, turn)
        return seconds

    def _visit(self, number: int, turn: int) -> float:
        slot = ImageSlot(number.to_bytes(32, "big"), VISUAL_TOKENS)
        history = self._turns.setdefault(number, [])
        history.append(Turn("user", (slot, _QUESTION) if not history else (_QUESTION,)))
        prompt = self._model.prompts.encode(history)
        request = GenerationRequest(
            "bench", prompt, StoppingOptions(_ANSWER_TOKENS, ignore_eos=True), features=(self._features(number),)
        )
        engine = self._model.engine
        started_s = time.perf_counter()
        sequence, _ = engine.submit(request)
        while engine.has_work:
            engine.step()
        seconds = time.perf_counter() - started_s
        answer = sequence.token_ids[len(prompt.token_ids) :]
        self.answers[number, turn] = answer
        # The history is text again, so tokens may differ from the answer's own from there on.
        seen = self._computed.get(number, 0)
        self.seen += seen
        self.found += min(seen, sequence.cached_tokens)
        history.append(Turn("assistant", (self._model.prompts.text_decoder.decode(answer),)))
        self._computed[number] = len(prompt.token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
        return seconds

    def _features(self, number: int) -> Tensor:
        """Returns random features [VISUAL_TOKENS, hidden], the same for the same number."""
        shape = VISUAL_TOKENS, self._model.config.decoder.hidden_size
        generator = torch.Generator().manual_seed(number)
        return (torch.randn(shape, generator=generator) * 0.1).to(self._model.dtype)
