"""OpenVINO GenAI's continuous batching; one thread runs its steps."""

import io
import itertools
import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from PIL import Image
from transformers import AutoTokenizer

CACHE_GIB = 1
BATCHED_TOKENS = 2048


Submit = Callable[[int], Any]
"""Hands a request of a number to the pipeline; returns its handle."""


def as_tensor(picture: bytes) -> Any:
    """Returns an encoded file as [1, height, width, 3], uint8."""
    return openvino.Tensor(np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))[np.newaxis])


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
        try:
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        except (
            RuntimeError
        ):  # Without bfloat16 arithmetic its attention wants the cache in float32, and does not ask for it.
            properties["KV_CACHE_PRECISION"] = "f32"
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        config = json.loads((Path(model) / "config.json").read_text("utf-8"))
        self._picture_tokens = config.get("image_seq_length") if "vision_config" in config else None
        self._arrived: queue.Queue[tuple[Submit, queue.Queue[int | None]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def stream(
        self, messages: list[dict[str, Any]], pictures: list[bytes], max_tokens: int
    ) -> tuple[int, Iterator[str]]:
        """See server.py."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        if self._picture_tokens is None:
            if pictures:
                raise ValueError("this model takes no pictures")
            encoded = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            length = len(encoded["input_ids"])
            arguments: tuple[Any, ...] = (openvino.Tensor(np.array([encoded["input_ids"]], np.int64)),)
        else:
            config.apply_chat_template = False  # It is here that it is applied.
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            length = len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            length += len(pictures) * (self._picture_tokens - 1)
            arguments = (text, [as_tensor(picture) for picture in pictures])
        tokens: queue.Queue[int | None] = queue.Queue()
        self._arrived.put((lambda number: self._pipeline.add_request(number, *arguments, config), tokens))
        return length, self._pieces(tokens)

    def _pieces(self, tokens: "queue.Queue[int | None]") -> Iterator[str]:
        while (token := tokens.get()) is not None:
            yield self._tokenizer.decode([token])

    def _run(self) -> None:
        numbers = itertools.count()
        running: list[tuple[Any, queue.Queue[int | None]]] = []
        while True:
            while not running or not self._arrived.empty():
                submit, tokens = self._arrived.get()
                running.append((submit(next(numbers)), tokens))  # Here pictures are encoded.
            self._pipeline.step()
            for handle, tokens in list(running):
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            tokens.put(token)
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    tokens.put(None)
                    running.remove((handle, tokens))
