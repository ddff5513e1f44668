"""One real Triton for the whole module: what it serves, batches, refuses, reloads and traces."""

import asyncio
import json
import secrets
import shutil
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import torch
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.triton.checkpoints import reference_features, write_checkpoint
from tests.triton.conftest import settings_for, silent
from tests.triton.lookup_model import write_bare_model, write_lookup_model
from triptych.telemetry.span_store import SpanReceiver, SpanStore
from triptych.triton.readiness import broken_models, is_ready
from triptych.triton.server import TritonServer
from triptych.triton.tracing import trace_arguments
from triptych.vision.export import export
from triptych.vision.export_graph import relative_difference

pytestmark = pytest.mark.integration

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Running:
    """The module's Triton."""

    server: TritonServer
    repository: Path
    spans: SpanStore
    lines: list[str]


@pytest.fixture(scope="module")
def running(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    repository = tmp_path_factory.mktemp("served") / "model_repository"
    shutil.copytree(exported, repository)
    write_lookup_model(repository)
    write_bare_model(repository, "bare")
    write_bare_model(repository, "accelerated")
    with (repository / "accelerated" / "config.pbtxt").open("a") as config:
        config.write('optimization { execution_accelerators { cpu_execution_accelerator [ { name: "openvino" } ] } }')
    lines: list[str] = []
    with SpanReceiver() as receiver:
        settings = settings_for(repository, trace_url=receiver.http_traces_url)
        with TritonServer(settings, lines.append, die_with_parent=True) as server:
            yield Running(server, repository, receiver.store, lines)


@pytest.fixture
async def client(running: Running) -> AsyncIterator[InferenceServerClient]:
    async with InferenceServerClient(running.server.grpc_address) as client:
        yield client


async def infer(client: InferenceServerClient, model: str, name: str, value: Array, output: str, **extra: Any) -> Array:
    kind = {"float32": "FP32", "int64": "INT64"}[str(value.dtype)]
    tensor = InferInput(name, list(value.shape), kind)
    tensor.set_data_from_numpy(value)
    result: Array = (await client.infer(model, [tensor], **extra)).as_numpy(output)
    return result


async def encode(client: InferenceServerClient, pixels: torch.Tensor, **extra: Any) -> Array:
    return await infer(client, "vision", "pixel_values", pixels.numpy(), "image_features", **extra)


async def look_up(client: InferenceServerClient, *indices: int, model: str = "lookup") -> Array:
    return await infer(client, model, "index", np.array(indices, np.int64)[:, None], "row")


def eventually(condition: Callable[[], bool], limit_s: float = 15.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


async def test_the_ensemble_equals_transformers_at_every_side(client: InferenceServerClient, checkpoint: Path) -> None:
    for side, batch in ((112, 1), (84, 3), (56, 2)):
        pixels = torch.randn(batch, 3, side, side)
        expected = reference_features(checkpoint, pixels).numpy()
        assert relative_difference(await encode(client, pixels), expected) < 1e-4


async def test_concurrent_requests_of_one_shape_each_get_their_own_result(
    client: InferenceServerClient, running: Running, checkpoint: Path
) -> None:
    images = [torch.randn(1 + index % 2, 3, 56, 56) for index in range(32)]
    results = await asyncio.gather(*(encode(client, pixels) for pixels in images))
    for pixels, result in zip(images, results, strict=True):
        assert relative_difference(result, reference_features(checkpoint, pixels).numpy()) < 1e-4


async def test_a_dynamic_batch_is_one_run_and_is_split_by_request(client: InferenceServerClient) -> None:
    before = await executions(client)
    rows = await asyncio.gather(*(look_up(client, index) for index in range(8)))
    assert [row.tolist() for row in rows] == [[[[index, 10 * index]]] for index in range(8)]
    assert await executions(client) - before < 8


async def test_an_error_stays_with_the_request_that_caused_it(client: InferenceServerClient) -> None:
    outcomes = await asyncio.gather(*(look_up(client, index) for index in (1, 99, 2, 3)), return_exceptions=True)
    error = outcomes[1]
    assert isinstance(error, InferenceServerException)
    assert "indices element out of data bounds" in str(error.message())
    assert [outcome.tolist() for outcome in outcomes if not isinstance(outcome, BaseException)] == [
        [[[1, 10]]],
        [[[2, 20]]],
        [[[3, 30]]],
    ]
    assert (await look_up(client, 5)).tolist() == [[[5, 50]]]


async def test_a_config_of_one_line_is_completed_from_the_file(client: InferenceServerClient) -> None:
    config = (await client.get_model_config("bare", as_json=True))["config"]
    assert config["max_batch_size"] == 4
    assert config["input"] == [{"name": "index", "data_type": "TYPE_INT64", "dims": ["1"]}]
    assert config["output"] == [{"name": "row", "data_type": "TYPE_FP32", "dims": ["1", "2"]}]
    assert (await look_up(client, 1, 2, model="bare")).tolist() == [[[1, 10]], [[2, 20]]]


async def test_an_accelerator_that_is_not_there_is_named_in_the_log_and_done_without(
    client: InferenceServerClient, running: Running
) -> None:
    assert (await look_up(client, 1, 2, model="accelerated")).tolist() == [[[1, 10]], [[2, 20]]]
    missing = "OpenVINOExecutionProvider" not in onnxruntime.get_available_providers()
    told = [line for line in running.lines if "without the accelerator 'openvino'" in line]
    assert bool(told) == missing


async def test_a_model_that_cannot_be_loaded_says_why_and_is_taken_once_it_is_repaired(
    client: InferenceServerClient, running: Running
) -> None:
    address = running.server.http_address
    staged = running.repository.parent / "broken"
    (staged / "1").mkdir(parents=True)
    shutil.copy(running.repository / "bare" / "config.pbtxt", staged)
    (staged / "1" / "model.onnx").write_bytes(b"this is no model")
    staged.rename(running.repository / "broken")
    assert eventually(lambda: "broken" in broken_models(address))
    assert "ONNX Runtime cannot load" in broken_models(address)["broken"]
    assert not await client.is_model_ready("broken")
    assert (await look_up(client, 5)).tolist() == [[[5, 50]]]

    shutil.copy(running.repository / "bare" / "1" / "model.onnx", running.repository.parent)
    (running.repository.parent / "model.onnx").rename(running.repository / "broken" / "1" / "model.onnx")
    assert eventually(lambda: is_ready(address))
    assert (await look_up(client, 5, model="broken")).tolist() == [[[5, 50]]]


async def test_every_concurrent_request_has_its_spans_below_its_caller(
    client: InferenceServerClient, running: Running
) -> None:
    pixels = torch.randn(1, 3, 56, 56)
    callers = [(secrets.token_hex(16), secrets.token_hex(8)) for _ in range(100)]

    async def traced(trace_id: str, span_id: str) -> None:
        span = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(1))
        context = trace.set_span_in_context(NonRecordingSpan(span))
        await encode(client, pixels, **trace_arguments(context))

    await asyncio.gather(*(traced(*caller) for caller in callers))
    wanted = ["InferRequest", "compute", "compute", "projector", "vision", "vision_encoder"]
    names = {trace_id: wanted for trace_id, _ in callers}
    assert eventually(lambda: {key: sorted(s.name for s in running.spans.trace(key)) for key in names} == names)
    for trace_id, span_id in callers:
        spans = {span.span_id: span for span in running.spans.trace(trace_id)}
        assert {span.service for span in spans.values()} == {"triton"}
        outside = {span.name: span.parent_id for span in spans.values() if span.parent_id not in spans}
        assert outside == {"InferRequest": span_id}


async def test_a_new_version_is_served_as_soon_as_it_is_exported(
    client: InferenceServerClient, running: Running, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", seed=7, vision_feature_layer=-1)
    pixels = torch.randn(1, 3, 56, 56)
    expected = reference_features(other, pixels).numpy()
    failures = 0
    stop = asyncio.Event()

    async def keep_asking() -> None:
        nonlocal failures
        while not stop.is_set():
            try:
                await encode(client, pixels)
            except InferenceServerException:
                failures += 1
            await asyncio.sleep(0.02)

    asking = asyncio.create_task(keep_asking())
    await asyncio.to_thread(export, other, running.repository, 2, silent)
    deadline = time.monotonic() + 15
    while relative_difference(await encode(client, pixels), expected) > 1e-4:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    stop.set()
    await asking
    assert failures == 0
    assert await client.is_model_ready("vision_encoder", "2")
    assert sorted(entry.name for entry in running.repository.parent.iterdir()) == ["model_repository"]


async def executions(client: InferenceServerClient) -> int:
    statistics = await client.get_inference_statistics("lookup", as_json=True)
    return int(statistics["model_stats"][0].get("execution_count", 0))


def test_a_request_without_a_trace_is_answered_over_http_too(running: Running) -> None:
    body = {"inputs": [{"name": "index", "shape": [1, 1], "datatype": "INT64", "data": [3]}]}
    request = urllib.request.Request(
        f"http://{running.server.http_address}/v2/models/lookup/infer", data=json.dumps(body).encode()
    )
    with urllib.request.urlopen(request) as response:
        assert json.load(response)["outputs"][0]["data"] == [3, 30]
