"""What people and Prometheus see of the KV cache, and what they can do to it."""

import json
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from tests.worker.checkpoints import Reference
from tests.worker.driving import identity_of
from tests.worker.serving import Client, image, request, settings_for, text_of
from triptych.commands.cache import run as run_command
from triptych.errors import InvalidRequest
from triptych.ports import free_ports
from triptych.v1 import worker_pb2
from triptych.worker.kv.meter import CacheMeter
from triptych.worker.server import run_worker

DOCUMENTED = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


@pytest.fixture
def metrics_port() -> int:
    return free_ports(1)[0]


@pytest.fixture
async def tiered(tiny_dir: Path, tmp_path: Path, metrics_port: int) -> AsyncIterator[Client]:
    settings = settings_for(tiny_dir, kv_disk_dir=tmp_path, kv_host_bytes=2 << 20, metrics_port=metrics_port)
    async with run_worker(settings) as worker:
        client = Client(worker)
        yield client
        await client.settle()
        await client.channel.close()


async def flush(client: Client) -> None:
    hierarchy = client.worker.model.engine.reuse.hierarchy
    assert hierarchy is not None
    assert hierarchy.flush()


async def inspect(client: Client) -> worker_pb2.CacheReport:
    return await client.stub.InspectCache(worker_pb2.InspectCacheRequest())


async def covered(client: Client, reference: Reference, seed: int) -> bool:
    prompt = request(image(reference, seed, features=False), text="another question").prompt
    return list((await client.stub.ProbeCache(worker_pb2.ProbeCacheRequest(prompt=prompt))).images_covered) == [True]


async def test_the_report_tells_tiers_hits_and_the_hottest_images(tiered: Client, tiny_reference: Reference) -> None:
    for seed, times in ((1, 3), (2, 1)):
        for _ in range(times):
            await tiered.answer(request(image(tiny_reference, seed)))
    await flush(tiered)
    report = await inspect(tiered)
    assert [tier.name for tier in report.tiers] == ["device", "host", "disk"]
    assert all(tier.visual.size_bytes > 0 and tier.text.size_bytes > 0 for tier in report.tiers)
    assert (report.visual.asked_tokens, report.visual.cached_tokens) == (64, 32)
    assert [(one.identity, one.asked, one.covered) for one in report.images] == [
        (identity_of(1), 3, 2),
        (identity_of(2), 1, 0),
    ]
    assert set(report.images[0].tier_bytes) == {"device", "host", "disk"}
    assert {move.way for move in report.moves} >= {"device_to_host", "host_to_disk"}
    assert report.block_seconds["prefill"] > 0


async def test_a_dropped_image_is_gone_from_every_tier_and_only_it(tiered: Client, tiny_reference: Reference) -> None:
    first = text_of(await tiered.answer(request(image(tiny_reference, 1))))
    await flush(tiered)
    await tiered.answer(request(image(tiny_reference, 2)))
    await flush(tiered)
    dropped = await tiered.stub.DropCached(worker_pb2.DropCachedRequest(identity=identity_of(1)))
    assert dropped.blocks >= 3
    assert not await covered(tiered, tiny_reference, 1)
    assert await covered(tiered, tiny_reference, 2)
    assert text_of(await tiered.answer(request(image(tiny_reference, 1)))) == first
    await tiered.stub.DropCached(worker_pb2.DropCachedRequest(everything=True))
    report = await inspect(tiered)
    assert all(tier.blocks == 0 for tier in report.tiers)
    assert not await covered(tiered, tiny_reference, 2)


async def test_dropping_while_a_request_runs_does_it_no_harm(tiered: Client, tiny_reference: Reference) -> None:
    expected = text_of(await tiered.answer(request(image(tiny_reference, 1))))
    await flush(tiered)
    call = tiered.stub.Generate(request(image(tiny_reference, 1, features=False)))
    events = [await anext(aiter(call))]
    await tiered.stub.DropCached(worker_pb2.DropCachedRequest(everything=True))
    events += [event async for event in call]
    assert text_of(events) == expected


async def test_pinning_is_reported_and_nonsense_is_refused(tiered: Client, tiny_reference: Reference) -> None:
    await tiered.answer(request(image(tiny_reference, 1)))
    await flush(tiered)
    await tiered.stub.PinImage(worker_pb2.PinImageRequest(identity=identity_of(1), pinned=True))
    assert [one.pinned for one in (await inspect(tiered)).images] == [True]
    await tiered.stub.PinImage(worker_pb2.PinImageRequest(identity=identity_of(1)))
    assert [one.pinned for one in (await inspect(tiered)).images] == [False]
    for call in (
        tiered.stub.PinImage(worker_pb2.PinImageRequest(identity=b"short", pinned=True)),
        tiered.stub.DropCached(worker_pb2.DropCachedRequest()),
        tiered.stub.DropCached(worker_pb2.DropCachedRequest(everything=False)),
        tiered.stub.InspectCache(worker_pb2.InspectCacheRequest(max_images=-1)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_command_finds_images_by_the_beginning_of_their_hash(
    tiered: Client, tiny_reference: Reference
) -> None:
    await tiered.answer(request(image(tiny_reference, 1)))
    await flush(tiered)
    address, name = f"127.0.0.1:{tiered.worker.port}", identity_of(1).hex()[:8]
    done, report = await run_command(address, 10, {"pin": name})
    assert done == [f"pinned {identity_of(1).hex()[:16]}"]
    assert report.images[0].pinned
    done, report = await run_command(address, 10, {"unpin": name, "drop": name})
    assert done[1].startswith("dropped ")
    assert not report.images[0].tier_bytes
    with pytest.raises(InvalidRequest, match="0 images"):
        await run_command(address, 10, {"drop": "ffff0000"})


async def test_the_command_prints_tables_and_json(tiered: Client, tiny_reference: Reference) -> None:
    import asyncio

    from triptych.cli import app

    await tiered.answer(request(image(tiny_reference, 1)))
    arguments = ["cache", "--worker", f"127.0.0.1:{tiered.worker.port}", "--json"]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout.splitlines()[-1])
    assert [tier["name"] for tier in fields["tiers"]] == ["device", "host", "disk"]
    assert fields["images"][0]["identity"] == identity_of(1).hex()


async def test_prometheus_scrapes_the_tiers_by_modality(
    tiered: Client, tiny_reference: Reference, metrics_port: int
) -> None:
    import asyncio

    for _ in range(2):
        await tiered.answer(request(image(tiny_reference, 1)))
    await flush(tiered)

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=5) as response:
            body: bytes = response.read()
        return body.decode()

    values = dict(line.rsplit(" ", 1) for line in (await asyncio.to_thread(scrape)).splitlines() if line[0] != "#")
    assert float(values['mm_kv_hit_rate{modality="visual"}']) == 0.5
    for tier in ("device", "host", "disk"):
        assert float(values[f'mm_visual_cache_tiers{{tier="{tier}"}}']) > 0
    assert float(values['mm_kv_moves_total{modality="visual",way="device_to_host"}']) > 0
    assert float(values['mm_kv_evictions_total{modality="visual",tier="device"}']) == 0
    assert all(name.partition("{")[0] in DOCUMENTED for name in values)


def test_the_meter_forgets_images_that_nobody_asks_for_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from triptych.worker.kv.identity import VisualSpan

    monkeypatch.setattr("triptych.worker.kv.meter._MOST_IMAGES", 3)
    meter = CacheMeter()
    for name in (1, 2, 3, 1, 4):
        meter.note(20, (VisualSpan(0, 10, identity_of(name)),), 5)
    assert set(meter.images) == {identity_of(name) for name in (3, 1, 4)}
    assert meter.tokens["visual"].hit_rate == 0.5
    assert meter.tokens["text"].cached == 0
