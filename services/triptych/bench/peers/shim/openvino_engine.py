"""OpenVINO GenAI's continuous batching; one thread runs its steps."""

import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai
from transformers import AutoTokenizer

CACHE_GIB = 2
BATCHED_TOKENS = 2048


def load(arguments: Any) -> "OpenVinoEngine":
    """See server.py."""
    return OpenVinoEngine(arguments.model, arguments.dtype, arguments.threads)


class OpenVinoEngine:
    """All calls into the pipeline come from the thread that runs `_run`."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_batched_tokens = BATCHED_TOKENS
        properties = {"INFERENCE_PRECISION_HINT": dtype, "INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._arrived: queue.Queue[tuple[Any, Any, queue.Queue[int | None]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def stream(
        self, messages: list[dict[str, Any]], pictures: list[bytes], max_tokens: int
    ) -> tuple[int, Iterator[str]]:
        """See server.py."""
        if pictures:
            raise ValueError("this engine is not set up for pictures")
        ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        tokens: queue.Queue[int | None] = queue.Queue()
        self._arrived.put((openvino.Tensor(np.array([ids], np.int64)), config, tokens))
        return len(ids), self._pieces(tokens)

    def _pieces(self, tokens: "queue.Queue[int | None]") -> Iterator[str]:
        while (token := tokens.get()) is not None:
            yield self._tokenizer.decode([token])

    def _run(self) -> None:
        numbers = itertools.count()
        running: list[tuple[Any, queue.Queue[int | None]]] = []
        while True:
            while not running or not self._arrived.empty():
                prompt, config, tokens = self._arrived.get()
                running.append((self._pipeline.add_request(next(numbers), prompt, config), tokens))
            self._pipeline.step()
            for handle, tokens in list(running):
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            tokens.put(token)
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    tokens.put(None)
                    running.remove((handle, tokens))
