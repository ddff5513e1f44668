"""From settings to the tiers below the device."""

import hashlib

import torch

from triptych.config import WorkerSettings
from triptych.worker.kv.blocks import PoolShares
from triptych.worker.kv.cache import KVCache
from triptych.worker.kv.hierarchy import Hierarchy, PinnedBlocks
from triptych.worker.kv.layout import BlockLayout
from triptych.worker.kv.tiers.disk import DiskTier
from triptych.worker.kv.tiers.host import HostTier
from triptych.worker.kv.tiers.tier import Tier
from triptych.worker.model.config import DecoderConfig

# Everything passes through the host tier, so that the tiers below need some room there.
_LEAST_SLOTS = 64


def pool_shares(settings: WorkerSettings) -> PoolShares:
    """Returns how text and visual KV divide the device's pool. Raises ValueError when they claim more than there is."""
    if settings.kv_text_share + settings.kv_visual_share > 1:
        raise ValueError("kv_text_share and kv_visual_share are more than 1 together")
    return PoolShares(settings.kv_text_share, settings.kv_visual_share, settings.kv_reserve_share)


def build_hierarchy(
    settings: WorkerSettings, config: DecoderConfig, cache: KVCache, fingerprint: str, kind: str
) -> Hierarchy | None:
    """Returns the tiers that the settings ask for; None without a host tier or a prefix cache.

    `fingerprint` is the checkpoint's, `kind` what computes it: KV outlives the process, and another kind's numbers are
    not quite the same. Raises ValueError and OSError, each saying what is wrong with which setting.
    """
    device, dtype = cache.keys[0].device, cache.keys[0].dtype
    owner = hashlib.sha256(f"{fingerprint}\0{kind}\0{torch.__version__}".encode()).hexdigest()
    layout = BlockLayout.of(config, dtype, owner)
    slots = settings.kv_host_bytes // layout.block_bytes
    has_below = settings.kv_disk_dir is not None or settings.kv_remote_url is not None
    if has_below and (slots < _LEAST_SLOTS or not settings.prefix_cache):
        raise ValueError(
            f"kv_disk_dir and kv_remote_url need prefix_cache, and a kv_host_bytes of at least "
            f"{_LEAST_SLOTS * layout.block_bytes} with this model"
        )
    if not slots or not settings.prefix_cache:
        return None
    pinned = PinnedBlocks()
    host = HostTier(layout, settings.kv_host_bytes, pinned=device.type == "cuda", has_below=has_below, keep=pinned)
    below: list[Tier] = []
    if settings.kv_disk_dir is not None:
        below.append(DiskTier(settings.kv_disk_dir, layout, settings.kv_disk_bytes, keep=pinned))
    if settings.kv_remote_url is not None:
        from triptych.worker.kv.tiers.remote import RemoteTier  # Only who uses it needs the client library.

        url = settings.kv_remote_url.get_secret_value()
        timeout_s, ttl_s = settings.kv_remote_timeout_s, settings.kv_remote_ttl_s
        below.append(RemoteTier(url, layout, timeout_s=timeout_s, ttl_s=ttl_s))
    return Hierarchy(cache, layout, host, below, policy=settings.kv_write_policy, pinned=pinned)
