"""Versions of the encoder come, break and go in a real Triton while images are encoded; none is lost or mixed up."""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tritonclient.grpc.aio import InferenceServerClient

from tests.triton.checkpoints import reference_features, write_checkpoint
from tests.triton.conftest import settings_for, silent
from triptych.commands.status import look
from triptych.errors import EncoderChanged, TriptychError
from triptych.triton.readiness import broken_versions
from triptych.triton.server import TritonServer
from triptych.vision.dispatcher import ScheduledEncoder
from triptych.vision.encoder import Features, TritonEncoder
from triptych.vision.export import export
from triptych.vision.export_graph import relative_difference
from triptych.vision.pool import EncoderPool
from triptych.vision.rollback import rollback
from triptych.vision.scheduler import Limits

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PIXELS = torch.randn(3, 56, 56, generator=torch.Generator().manual_seed(0))
LIMITS = Limits(pixel_budget=64 * 56 * 56, max_inflight=2, batch_timeout_s=0.005, lift_s=1.0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("other") / "model", seed=7, vision_feature_layer=-1)


@pytest.fixture
def repository(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "model_repository"))


@pytest.fixture
def server(repository: Path) -> Iterator[TritonServer]:
    with TritonServer(settings_for(repository, control_mode="poll"), die_with_parent=True) as server:
        yield server


@dataclass
class Traffic:
    """Images that are encoded all the time, as the router does it.

    Attributes:
        encoder: Asked for the version that an image was named with.
        expected: Right features by version.
        outcomes: How each image ended: its version, or the error's reason.
        named_anew: How often a version was gone between name and features.
    """

    encoder: ScheduledEncoder
    expected: dict[str, Features]
    outcomes: Counter[str] = field(default_factory=Counter)
    named_anew: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def one(self) -> str:
        for _ in range(4):
            spec = self.encoder.spec
            assert spec is not None
            await asyncio.sleep(0.01)  # Between name and features things may change.
            try:
                features = await self.encoder.encode(PIXELS.numpy(), 5.0, version=spec.version)
            except EncoderChanged:
                self.named_anew += 1
                await self.encoder.refresh(2.0)
                continue
            except TriptychError as error:
                return f"{error.reason}: {error.message}"
            right = relative_difference(features, self.expected[spec.version]) < 1e-4
            return spec.version if right else f"wrong features for version {spec.version}"
        return "named anew too often"

    async def run(self) -> None:
        async def keep_asking() -> None:
            while not self.stop.is_set():
                self.outcomes[await self.one()] += 1

        async def keep_looking() -> None:
            while not self.stop.is_set():
                await self.encoder.refresh(2.0)
                await asyncio.sleep(0.2)

        await asyncio.gather(keep_looking(), *(keep_asking() for _ in range(6)))

    async def until_only(self, version: str, limit_s: float = 30.0) -> None:
        """Waits until images end with a version and no other for a second."""
        deadline = time.monotonic() + limit_s
        while True:
            before = Counter(self.outcomes)
            await asyncio.sleep(1.0)
            if set(self.outcomes - before) == {version}:
                return
            assert time.monotonic() < deadline, self.outcomes - before

    def check(self, *versions: str) -> None:
        assert set(self.outcomes) == set(versions), self.outcomes
        self.encoder.check_integrity()


@asynccontextmanager
async def traffic(server: TritonServer, checkpoint: Path, other: Path) -> AsyncIterator[Traffic]:
    expected = {
        version: reference_features(folder, PIXELS[None]).numpy()[0]
        for version, folder in (("1", checkpoint), ("2", other))
    }
    encoder = ScheduledEncoder(EncoderPool([TritonEncoder(server.grpc_address, "vision")]), LIMITS, 10**6, 100)
    assert await encoder.refresh(5.0)
    traffic = Traffic(encoder, expected)
    running = asyncio.create_task(traffic.run())
    try:
        await traffic.until_only("1")
        yield traffic
    finally:
        traffic.stop.set()
        await running
        await encoder.close()


async def test_an_update_and_its_rollback_lose_no_image_and_mix_none(
    server: TritonServer, repository: Path, checkpoint: Path, other: Path
) -> None:
    async with traffic(server, checkpoint, other) as asked:
        await asyncio.to_thread(export, other, repository, 2, silent)
        await asked.until_only("2")
        await asyncio.to_thread(rollback, repository)
        await asked.until_only("1")
    asked.check("1", "2")


async def test_removing_the_folders_of_a_version_by_hand_is_a_rollback_too(
    server: TritonServer, repository: Path, checkpoint: Path, other: Path
) -> None:
    async with traffic(server, checkpoint, other) as asked:
        await asyncio.to_thread(export, other, repository, 2, silent)
        await asked.until_only("2")
        for name in ("vision_v2", "vision/2", "projector/2", "vision_encoder/2"):
            shutil.rmtree(repository / name)
        await asked.until_only("1")
    asked.check("1", "2")


async def test_explicit_loading_changes_versions_too(
    repository: Path, checkpoint: Path, other: Path, tmp_path: Path
) -> None:
    settings = settings_for(repository, control_mode="explicit")
    with TritonServer(settings, die_with_parent=True) as server:
        async with traffic(server, checkpoint, other) as asked, InferenceServerClient(server.grpc_address) as triton:
            await asyncio.to_thread(export, other, repository, 2, silent)
            await triton.load_model("vision_v2")
            await asked.until_only("2")
            await triton.unload_model("vision_v2")
            await asked.until_only("1")
        asked.check("1", "2")


async def test_a_broken_version_leaves_the_old_one_serving_and_is_named(
    server: TritonServer, repository: Path, checkpoint: Path, other: Path, tmp_path: Path
) -> None:
    staged = tmp_path / "staged"
    shutil.copytree(repository, staged)
    export(other, staged, 2, silent)
    (staged / "vision_encoder" / "2" / "model.onnx").write_bytes(b"this is no model")
    async with traffic(server, checkpoint, other) as asked:
        for name in ("vision_encoder", "projector", "vision_v2", "vision"):
            if (repository / name).exists():
                (repository / name).rename(tmp_path / f"old {name}")
            (staged / name).rename(repository / name)
        broken: dict[str, str] = {}
        async with asyncio.timeout(60):
            while "vision_encoder v2" not in broken:
                broken |= await asyncio.to_thread(broken_versions, server.http_address, 1.0)
                await asyncio.sleep(0.1)
        await asked.until_only("1", 60)
        services = await look("127.0.0.1:1", "127.0.0.1:1", server.http_address, None)
    asked.check("1")
    assert "ONNX Runtime cannot load" in broken["vision_encoder v2"]
    assert "vision_v2" in broken
    triton = next(service for service in services if service.name == "triton")
    assert triton.serving and "vision_v2" in triton.facts["broken"]
