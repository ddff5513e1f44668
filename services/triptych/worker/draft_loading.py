"""From settings to a draft model."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from triptych.config import WorkerSettings
from triptych.worker.backend import choose_backend
from triptych.worker.engine.draft_model import DraftModel
from triptych.worker.kv.blocks import BlockPool
from triptych.worker.kv.cache import KVCache
from triptych.worker.model.config import DecoderConfig, ModelConfig, load_model_config
from triptych.worker.model.weights import load_decoder_weights


def read_draft_config(settings: WorkerSettings, target: ModelConfig) -> DecoderConfig | None:
    """Returns the draft model's shape, or None when there is none.

    Raises ValueError when it cannot guess for the model of `model_dir`, and what `load_model_config` raises.
    """
    folder = settings.draft_model
    if folder is None:
        return None
    if not settings.speculative_tokens:
        raise ValueError("draft_model is set and speculative_tokens is 0; say how many tokens it may guess at once")
    config = load_model_config(folder).decoder
    if config.vocabulary != target.decoder.vocabulary:
        raise ValueError(
            f"draft_model={folder} has a vocabulary of {config.vocabulary} tokens, model_dir one of "
            f"{target.decoder.vocabulary}; a draft model needs the same"
        )
    if _tokens_of(folder) != _tokens_of(settings.model_dir):
        raise ValueError(f"draft_model={folder} has another tokenizer than model_dir; a draft model needs the same")
    return config


def load_draft_model(
    settings: WorkerSettings,
    config: DecoderConfig,
    target: ModelConfig,
    blocks: int,
    device: torch.device,
    dtype: torch.dtype,
) -> DraftModel:
    """Loads the draft model of `config`, and allocates `blocks` blocks of KV for it.

    Raises UnsupportedCheckpoint or ValueError, saying what is wrong with the folder or setting.
    """
    folder = settings.draft_model
    if folder is None:
        raise ValueError("draft_model is not set")
    if settings.draft_weights == "int8":
        settings = settings.model_copy(update={"weights": "int8"})
    weights = load_decoder_weights(folder, config, device, dtype)
    cache = KVCache(config, blocks, device, dtype)
    backend, _ = choose_backend(settings, config, weights, cache)
    return DraftModel(
        weights.embedding,
        cache,
        BlockPool(blocks),
        backend,
        context_tokens=config.context_tokens,
        step_tokens=settings.step_token_budget,
        never=target.image_token_id,
    )


def _tokens_of(folder: Path) -> dict[str, int]:
    """Returns the id of every token. Raises ValueError when the folder has no tokenizer."""
    try:
        tokens: dict[str, int] = AutoTokenizer.from_pretrained(folder).get_vocab()
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no tokenizer that can be read: {error}") from error
    return tokens
