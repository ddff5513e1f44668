"""`triptych status`: what runs, and why something does not."""

import asyncio
import json

import pytest

from tests.commands.conftest import Stack, triptych
from tests.router.fakes import FakeWorker, start_worker
from triptych.commands.status import Service, _gateway_facts, look, table_of


@pytest.mark.integration
def test_a_running_stack_is_shown_with_versions_models_and_load(stack: Stack) -> None:
    result = stack.triptych("status", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    status = json.loads(result.stdout.splitlines()[-1])
    assert status["serving"] is True
    services = {service["name"]: service for service in status["services"]}
    assert set(services) == {"gateway", "router", "worker", "triton"}
    assert all(service["serving"] and service["version"] and not service["problem"] for service in services.values())
    models = set(services["triton"]["facts"]["models"])
    assert models >= {"vision", "vision_v1", "vision_encoder", "projector", "vision_draft"}
    assert {"waiting", "running", "kv_blocks"} <= set(services["worker"]["facts"])
    assert services["worker"]["facts"]["kv_blocks"]["total"] > 0


@pytest.mark.integration
def test_the_table_names_every_service(stack: Stack) -> None:
    result = stack.triptych("status")
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("gateway", "router", "worker", "triton", "kv blocks"))


def test_nothing_running_is_said_per_service_with_exit_code_1() -> None:
    nobody = "127.0.0.1:1"
    arguments = ("--address", nobody, "--worker", nobody, "--triton", nobody, "--gateway", f"http://{nobody}")
    result = triptych("status", *arguments, "--json")
    assert result.returncode == 1
    status = json.loads(result.stdout)
    assert status["serving"] is False
    assert all(service["problem"] for service in status["services"])
    assert "Traceback" not in result.stderr


async def test_a_worker_alone_is_serving_while_the_rest_is_not() -> None:
    server, port = await start_worker(FakeWorker())
    try:
        services = await look("127.0.0.1:1", f"127.0.0.1:{port}", "127.0.0.1:1", None)
    finally:
        await server.stop(None)
    by_name = {service.name: service for service in services}
    assert set(by_name) == {"router", "worker", "triton"}
    assert by_name["worker"].version.startswith("demo cafe")
    assert not by_name["router"].serving and not by_name["triton"].serving


def test_a_broken_model_is_shown_with_its_reason() -> None:
    import io

    from rich.console import Console

    broken = Service(
        "triton", "a:1", problem="not all of its models are ready", facts={"broken": {"vision": "no file"}}
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table_of([broken]))
    text = console.export_text()
    assert "not serving" in text and "vision no file" in text


def test_the_share_of_cached_tokens_comes_from_the_gateways_metrics() -> None:
    metrics = '# HELP x\nmm_prompt_tokens_total{kind="text"} 30\nmm_prompt_tokens_total{kind="visual"} 10\n'
    facts = _gateway_facts(metrics + "mm_cached_tokens_total 10.0\nmm_http_requests_in_flight 2.0\n")
    assert facts == {"in_flight": 2, "prompt_tokens_from_cache": 0.25}


def test_probes_run_at_once_and_end_in_time() -> None:
    async def timed() -> float:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await look("127.0.0.1:1", "127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1:1")
        return loop.time() - begun_s

    assert asyncio.run(timed()) < 10
