"""The control: transformers on the same weights, with its own static batch and cache, in whichever type is faster."""

import time
from pathlib import Path
from typing import Any

import torch


class Transformers:
    """A checkpoint as transformers runs it."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        is_text = AutoConfig.from_pretrained(model_dir).model_type != "llava"
        kind: Any = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
        self._model = kind.from_pretrained(model_dir, dtype=dtype).eval()
        self._vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        self._cache: Any = None
        self._next = torch.empty(0)

    @torch.inference_mode()
    def prefill(self, rows: int, tokens: int) -> float:
        """Seconds for the first token of `rows` prompts of `tokens` random tokens each, as one batch."""
        ids = torch.randint(6, self._vocabulary, (rows, tokens))
        begin = time.perf_counter()
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        self._next = output.logits[:, -1].argmax(-1, keepdim=True)
        self._cache = output.past_key_values
        return time.perf_counter() - begin

    @torch.inference_mode()
    def decode(self) -> float:
        """Seconds for one more token of each row of the last `prefill`."""
        begin = time.perf_counter()
        output = self._model(input_ids=self._next, cache=self._cache, use_cache=True)
        self._next = output.logits[:, -1].argmax(-1, keepdim=True)
        self._cache = output.past_key_values
        return time.perf_counter() - begin
