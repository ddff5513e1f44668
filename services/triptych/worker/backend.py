"""What computes the decoder's steps here: the C++ engine, or torch."""

import logging

import torch

from triptych.config import WorkerSettings
from triptych.worker.cpu.build import KernelsUnavailable
from triptych.worker.cpu.decoder import CpuDecoder, WeightFormat
from triptych.worker.kv.cache import KVCache
from triptych.worker.kv.low_rank import LowRankBasis
from triptych.worker.model.config import DecoderConfig
from triptych.worker.model.decoder import Decoder
from triptych.worker.model.rotary import Rotary
from triptych.worker.model.step import StepBackend
from triptych.worker.model.torch_backend import TorchBackend
from triptych.worker.model.weights import DecoderWeights

log = logging.getLogger(__name__)

# float16 weights are kept as float32: few CPUs compute in float16, and bfloat16 would lose digits.
_WEIGHT_FORMATS: dict[torch.dtype, WeightFormat] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp32",
}


def choose_backend(
    settings: WorkerSettings,
    config: DecoderConfig,
    weights: DecoderWeights,
    cache: KVCache,
    host: KVCache | None = None,
    basis: LowRankBasis | None = None,
) -> tuple[StepBackend, str]:
    """Returns what computes steps, and its name for the log: the C++ engine on CPU where it works, else torch.

    `host` and `basis` are what segments in host memory, or of principal components, are in.

    Raises ValueError when the settings ask for the C++ engine and it cannot be used here.
    """
    device, dtype = cache.keys[0].device, cache.keys[0].dtype
    wanted = settings.kernels == "native" or settings.weights == "int8"
    if device.type == "cpu" and settings.kernels != "torch":
        weight_format: WeightFormat = "int8" if settings.weights == "int8" else _WEIGHT_FORMATS[dtype]
        rotary = Rotary(config.rope, config.head_dim, config.context_tokens, device, torch.float32)
        tables = (rotary.cosines, rotary.sines)
        try:
            decoder = CpuDecoder(config, weights, tables, cache.keys, cache.values, weight_format)
            if host is not None:
                decoder.add_host_cache(host.keys, host.values)
            if basis is not None:
                decoder.set_basis(basis)
        except KernelsUnavailable as error:
            if wanted:
                raise ValueError(f"the C++ engine cannot be used: {error}") from error
            log.warning("the C++ engine cannot be used; torch computes instead, several times slower: %s", error)
        else:
            return decoder, f"{decoder.isa} kernels, {weight_format}"
    elif wanted:
        raise ValueError("kernels=native and weights=int8 need device=cpu, and kernels must not be torch")
    return TorchBackend(Decoder(config, weights), cache, host, basis), "torch"
