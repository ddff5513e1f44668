"""Which versions of the vision model a Triton serves.

`triptych export` writes an ensemble per version, `vision_v1`, `vision_v2`, each of which names the versions of encoder
and projector that belong together. The plain ensemble `vision` takes the newest of each, which for a moment of an
update are not of one export; it is asked only where a repository has no others.
"""

import re
from collections.abc import Mapping

import grpc
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from triptych.vision.encoder_spec import (
    PARAMETER,
    EncoderSpec,
    misconfigured,
    newest,
    parse_encoder_spec,
    unready,
    versioned_name,
)

READY = "READY"


async def read_versions(client: InferenceServerClient, model: str, timeout_s: float) -> Mapping[str, EncoderSpec]:
    """Returns the spec of each version that is ready, by version; at least one.

    Raises InferenceServerException or RpcError when Triton does not answer, Unavailable when it serves no version or
    the newest was not exported for Triptych.
    """
    versions = {}
    for version in await _ready_versions(client, model, timeout_s):
        name = versioned_name(model, version)
        versions[version] = await _read_spec(client, name, version, timeout_s)
    if not versions:
        metadata = await client.get_model_metadata(model, client_timeout=timeout_s)
        version = max(metadata.versions, key=lambda name: int(name) if name.isdigit() else -1, default="")
        versions = {version: await _read_spec(client, model, version, timeout_s)}
    name = newest(versions).model
    if not await client.is_model_ready(name, client_timeout=timeout_s):
        raise unready(f"model {name} is not ready")
    return versions


async def _ready_versions(client: InferenceServerClient, model: str, timeout_s: float) -> list[str]:
    try:
        index = await client.get_model_repository_index(client_timeout=timeout_s)
    except InferenceServerException as error:
        if str(error.status()) == str(grpc.StatusCode.UNIMPLEMENTED):  # A server that is no Triton.
            return []
        raise
    pattern = re.compile(rf"{re.escape(model)}_v([0-9]+)")
    matches = (pattern.fullmatch(entry.name) for entry in index.models if entry.state == READY)
    return [match[1] for match in matches if match]


async def _read_spec(client: InferenceServerClient, model: str, version: str, timeout_s: float) -> EncoderSpec:
    config = (await client.get_model_config(model, client_timeout=timeout_s)).config
    if PARAMETER not in config.parameters:
        raise misconfigured("it is missing")
    return parse_encoder_spec(config.parameters[PARAMETER].string_value, version, model, max(1, config.max_batch_size))
