"""From settings to a ready engine."""

import logging
import os
import time
from dataclasses import dataclass

import torch

from triptych.config import WorkerSettings
from triptych.worker.backend import choose_backend
from triptych.worker.draft_loading import load_draft_model, read_draft_config
from triptych.worker.engine.engine import Engine
from triptych.worker.engine.runner import Runner
from triptych.worker.kv.blocks import BlockPool
from triptych.worker.kv.building import build_hierarchy, pool_shares
from triptych.worker.kv.cache import KVCache, block_bytes
from triptych.worker.kv.low_rank import FILE_NAME, LowRankBasis
from triptych.worker.kv.visual import VisualKv
from triptych.worker.model.config import DecoderConfig, ModelConfig, load_model_config
from triptych.worker.model.weights import fingerprint, load_decoder_weights
from triptych.worker.prompt import PromptEncoder

log = logging.getLogger(__name__)

PARAMETERS_PER_THREAD = 8_000_000


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint ready to serve.

    Attributes:
        name: What clients call it.
        fingerprint: Hash of weights and configuration, hex.
        config: Its shape.
        prompts: Its tokenizer and chat template.
        engine: Its engine.
        device: Where features must be.
        dtype: Element type features must have.
    """

    name: str
    fingerprint: str
    config: ModelConfig
    prompts: PromptEncoder
    engine: Engine
    device: torch.device
    dtype: torch.dtype


def load_model(settings: WorkerSettings) -> LoadedModel:
    """Loads a checkpoint and allocates its KV cache; takes seconds to minutes.

    Raises FileNotFoundError, UnsupportedCheckpoint or ValueError, each saying what is wrong with the folder or setting.
    """
    started_s = time.monotonic()
    model_dir = settings.model_dir
    config = load_model_config(model_dir)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device, config.decoder.dtype)
    if device.type == "cpu":
        torch.set_num_threads(settings.threads or choose_threads(config.decoder, len(os.sched_getaffinity(0))))
    draft = read_draft_config(settings, config)
    bytes_of_both = block_bytes(config.decoder, dtype) + (block_bytes(draft, dtype) if draft else 0)
    blocks = settings.kv_blocks or settings.kv_cache_bytes // bytes_of_both
    if not blocks:
        raise ValueError(f"kv_cache_bytes={settings.kv_cache_bytes} is less than one KV block; raise it")
    prompts = PromptEncoder(model_dir, config.image_token_id)
    weights = load_decoder_weights(model_dir, config.decoder, device, dtype)
    cache = KVCache(config.decoder, blocks, device, dtype)
    if config.decoder.head_dim % settings.visual_kv_ratio:
        raise ValueError(
            f"visual_kv_ratio={settings.visual_kv_ratio} does not divide the model's head_dim of "
            f"{config.decoder.head_dim}; use 4"
        )
    checkpoint = fingerprint(model_dir)
    host = _host_cache(settings, config.decoder, device, dtype)
    basis = _basis(settings, config.decoder, checkpoint)
    backend, kind = choose_backend(settings, config.decoder, weights, cache, host, basis)
    runner = Runner(config.decoder, weights.embedding, cache, backend)
    hierarchy = build_hierarchy(settings, config.decoder, cache, checkpoint, kind)
    pool = BlockPool(blocks, pool_shares(settings), hierarchy)
    visual_kv = VisualKv(config.decoder, cache, pool, host, basis, settings.visual_kv_ratio)
    visual_kv.check(settings.visual_kv)
    draft_model = load_draft_model(settings, draft, config, blocks, device, dtype) if draft else None
    tokens, ends, image_token = prompts.text_decoder, config.end_token_ids, config.image_token_id
    engine = Engine(runner, pool, visual_kv, tokens, ends, settings, image_token, draft_model, hierarchy)
    name = settings.model_name or model_dir.resolve().name
    log.info(
        "loaded %s in %.1f s: %s on %s (%s), %d KV blocks, context of %d tokens",
        name,
        time.monotonic() - started_s,
        str(dtype).removeprefix("torch."),
        device,
        kind,
        blocks,
        engine.context_tokens,
    )
    return LoadedModel(name, checkpoint, config, prompts, engine, device, dtype)


def _host_cache(
    settings: WorkerSettings, config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> KVCache | None:
    """Returns the host memory for visual KV that is offloaded; None when the settings give it less than a block."""
    blocks = settings.offload_kv_bytes // block_bytes(config, dtype)
    return KVCache(config, blocks, torch.device("cpu"), dtype, pinned=device.type == "cuda") if blocks else None


def _basis(settings: WorkerSettings, config: DecoderConfig, fingerprint: str) -> LowRankBasis | None:
    """Returns the checkpoint's principal components at the ratio of the settings; None when none were fitted.

    Only a file that the settings name must fit: one that was left beside new weights is no reason not to serve them.
    """
    path = settings.visual_kv_basis or settings.model_dir / FILE_NAME
    if settings.visual_kv_basis is None and not path.is_file():
        return None
    if not path.is_file():
        raise FileNotFoundError(f"visual_kv_basis={path} does not exist; write it with `triptych compress`")
    try:
        basis = LowRankBasis.load(path, fingerprint)
    except ValueError as error:
        if settings.visual_kv_basis is not None:
            raise
        log.warning("compress_visual_low_rank is not available: %s", error)
        return None
    return basis.truncated(config.head_dim // settings.visual_kv_ratio)


def choose_device(name: str) -> torch.device:
    """Returns the device that `auto`, `cpu` or `cuda[:n]` means here. Raises ValueError when CUDA is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={name}, but torch finds no CUDA; use device=cpu")
    return torch.device(name)


def choose_threads(config: DecoderConfig, cores: int) -> int:
    """Returns how many torch threads serve a decoder of this shape: one per PARAMETERS_PER_THREAD, at most all cores.

    Threads that wait for each other after every small product cost more than they bring: with the demo's 1.4 million
    parameters, two threads on two shared cores gave less than half the tokens of one.
    """
    attention = config.hidden_size * config.head_dim * 2 * (config.heads + config.kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    parameters = config.layers * layer + config.vocabulary * config.hidden_size
    return max(1, min(cores, parameters // PARAMETERS_PER_THREAD))


def choose_dtype(name: str, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """Returns the element type that a setting means; `auto` is the checkpoint's on CUDA and float32 on CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else checkpoint
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
