"""Runs the worker's own engine, in process: all of a step but gRPC."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from triptych.config import WorkerSettings
from triptych.worker.cpu.decoder import CpuDecoder
from triptych.worker.engine.request import GenerationRequest, StoppingOptions, TokenizedPrompt
from triptych.worker.engine.sequence import Phase
from triptych.worker.engine.sequence import Sequence as Running
from triptych.worker.kv.blocks import blocks_for
from triptych.worker.loading import load_model
from triptych.worker.model.step import SequenceRows, StepBackend, StepResult


class TimedBackend:
    """Passes steps on and keeps how long the last one took, from its start to its result."""

    def __init__(self, backend: StepBackend) -> None:
        self.input_dtype = backend.input_dtype
        self._backend = backend
        self.seconds = 0.0

    def start(
        self, embedded: Tensor, sequences: Sequence[SequenceRows], *, logits: bool = True, greedy: bool = False
    ) -> Callable[[], StepResult]:
        """As `StepBackend`."""
        begin = time.perf_counter()
        finish = self._backend.start(embedded, sequences, logits=logits, greedy=greedy)

        def timed() -> StepResult:
            result = finish()
            self.seconds = time.perf_counter() - begin
            return result

        return timed


class Driver:
    """A loaded checkpoint and its engine, whose arithmetic is timed apart.

    Attributes:
        model: The checkpoint.
        running: What was started and has not been stopped.
        bytes_per_weight: Size of a weight as it is kept: the C++ engine keeps float16 as float32.
    """

    def __init__(self, model_dir: Path, dtype: str, weights: str, threads: int | None, tokens: int) -> None:
        """Loads `model_dir` with room for `tokens` positions in the KV cache. Raises what `load_model` does."""
        settings = WorkerSettings.model_validate(
            {
                "model_dir": model_dir,
                "device": "cpu",
                "dtype": dtype,
                "weights": weights,
                "threads": threads,
                "kv_blocks": blocks_for(tokens),
                "prefix_cache": False,  # Else the second run of a prompt would cost nothing.
            }
        )
        self.model = load_model(settings)
        self.running: list[Running] = []
        backend = self.model.engine.runner.backend
        self.bytes_per_weight = (
            backend.bytes_per_weight if isinstance(backend, CpuDecoder) else self.model.dtype.itemsize
        )
        self._backend = TimedBackend(backend)
        self.model.engine.runner.backend = self._backend
        self._dice = random.Random(0)

    def start(self, prompt_tokens: int, max_tokens: int) -> Running:
        """Queues a greedy generation after random tokens; what they are makes no difference to the time."""
        vocabulary = self.model.config.decoder.vocabulary
        prompt = TokenizedPrompt(tuple(self._dice.randrange(vocabulary) for _ in range(prompt_tokens)))
        request = GenerationRequest("bench", prompt, StoppingOptions(max_tokens, ignore_eos=True))
        sequence, _ = self.model.engine.submit(request)
        self.running.append(sequence)
        return sequence

    def step(self) -> tuple[float, float]:
        """Runs one step as the worker's loop does. Returns its seconds, and for how many of them arithmetic ran."""
        engine = self.model.engine
        begin = time.perf_counter()
        engine.start()
        engine.tell()
        engine.finish()
        return time.perf_counter() - begin, self._backend.seconds

    def decode_all(self) -> None:
        """Runs steps until everything started decodes. Raises RuntimeError when some of it has ended before."""
        while any(sequence.phase is not Phase.DECODE for sequence in self.running):
            if any(sequence.phase is Phase.ENDED for sequence in self.running):
                raise RuntimeError("a measured answer ended before the last one began")
            self.step()

    def stop_all(self) -> None:
        """Ends everything started."""
        for sequence in self.running:
            self.model.engine.cancel(sequence)
        self.running.clear()
