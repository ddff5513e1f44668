"""transformers' `generate`; one thread runs it, on a batch of what has arrived."""

import io
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)
from transformers.generation.streamers import BaseStreamer

GATHER_S = 0.005
"""How long the line must be quiet before a batch begins."""


def load(arguments: Any) -> "TransformersEngine":
    """See server.py."""
    torch.set_num_threads(arguments.threads)
    return TransformersEngine(arguments.model, getattr(torch, arguments.dtype))


@dataclass
class Waiting:
    """A request: its prompt, its pictures' pixels, its length, and where its tokens go (None ends them)."""

    ids: list[int]
    pixels: torch.Tensor | None
    max_tokens: int
    tokens: "queue.Queue[int | None]" = field(default_factory=queue.Queue)


class Spreader(BaseStreamer):  # type: ignore[misc]  # transformers is not followed.
    """Gives each row of a batch its token, until it has as many as it asked for."""

    def __init__(self, batch: list[Waiting]) -> None:
        self._batch = batch
        self._made = -1  # The prompts come first.

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompts, then with a token of each row."""
        self._made += 1
        if self._made:
            for request, token in zip(self._batch, value.tolist(), strict=True):
                if self._made <= request.max_tokens:
                    request.tokens.put(token)
                if self._made == request.max_tokens:
                    request.tokens.put(None)

    def end(self) -> None:
        """Called last."""


class TransformersEngine:
    """All calls into the model come from the thread that runs `_run`."""

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        sees = hasattr(AutoConfig.from_pretrained(model), "vision_config")
        self._processor = AutoProcessor.from_pretrained(model) if sees else None
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        self._model = kind.from_pretrained(model, dtype=dtype).eval()
        self._arrived: queue.Queue[Waiting] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def stream(
        self, messages: list[dict[str, Any]], pictures: list[bytes], max_tokens: int
    ) -> tuple[int, Iterator[str]]:
        """See server.py."""
        ids, pixels = self._read(messages, pictures)
        request = Waiting(ids, pixels, max_tokens)
        self._arrived.put(request)
        return len(ids), self._pieces(request)

    def _read(self, messages: list[dict[str, Any]], pictures: list[bytes]) -> tuple[list[int], torch.Tensor | None]:
        if not pictures:
            encoded = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            return encoded["input_ids"], None
        if self._processor is None:
            raise ValueError("this model takes no pictures")
        text = self._processor.apply_chat_template(messages, add_generation_prompt=True)
        images = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
        inputs = self._processor(images=images, text=text, return_tensors="pt")
        return inputs["input_ids"][0].tolist(), inputs["pixel_values"]

    def _pieces(self, request: Waiting) -> Iterator[str]:
        while (token := request.tokens.get()) is not None:
            yield self._tokenizer.decode([token])

    def _run(self) -> None:
        while True:
            batch = [self._arrived.get()]
            while True:
                try:
                    batch.append(self._arrived.get(timeout=GATHER_S))
                except queue.Empty:
                    break
            try:
                self._generate(batch)
            finally:  # Of a batch that fails, nobody shall wait for ever.
                for request in batch:
                    request.tokens.put(None)

    @torch.inference_mode()
    def _generate(self, batch: list[Waiting]) -> None:
        longest, tokens = max(len(one.ids) for one in batch), max(one.max_tokens for one in batch)
        padding = self._tokenizer.pad_token_id or 0
        rows = [[padding] * (longest - len(one.ids)) + one.ids for one in batch]
        mask = [[0] * (longest - len(one.ids)) + [1] * len(one.ids) for one in batch]
        pixels = [one.pixels for one in batch if one.pixels is not None]
        seen = {"pixel_values": torch.cat(pixels).to(self._model.dtype)} if pixels else {}
        self._model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=padding,
            streamer=Spreader(batch),
            **seen,
        )
