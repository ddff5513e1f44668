"""The containers, for real: built, started, asked from outside through the published port."""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych.client import AsyncClient, Options
from triptych.demo import ANSWER, PICTURE, QUESTION
from triptych.processes import free_ports
from triptych.rpc.health import is_serving

pytestmark = [pytest.mark.compose, pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
PROJECT = "triptych-test"
SERVICES = ("triton", "worker", "router")


def compose_command() -> list[str]:
    """Returns `docker compose` or `docker-compose`; skips the test when there is no engine to run it on."""
    if shutil.which("docker") is None:
        pytest.skip("no docker command")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker engine answers")
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("neither `docker compose` nor docker-compose")


def have_base_image() -> bool:
    base = "python:3.11-slim-bookworm"
    inspect = subprocess.run(["docker", "image", "inspect", base], capture_output=True, check=False)
    if inspect.returncode == 0:
        return True
    return subprocess.run(["docker", "pull", "-q", base], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    compose = [*compose_command(), "-p", PROJECT]
    if not have_base_image():
        pytest.skip("the base image python:3.11-slim-bookworm is neither here nor can it be pulled")
    port = free_ports(1)[0]
    environment = {
        **os.environ,
        "TRIPTYCH_ROUTER_PORT": str(port),
        # Jaeger's image is not needed to answer: only the three of ours are started.
        "OTEL_EXPORTER_OTLP_ENDPOINT": "",
        "TRIPTYCH_TRITON_TRACE_URL": "",
    }

    def run(*arguments: str, check: bool = True) -> str:
        result = subprocess.run(
            [*compose, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert not check or result.returncode == 0, result.stdout[-5000:]
        return result.stdout

    try:
        run("build", *SERVICES)
        run("up", "-d", *SERVICES)
        deadline = time.monotonic() + 180
        while not asyncio.run(is_serving(f"127.0.0.1:{port}")):
            assert time.monotonic() < deadline, run("logs", "--tail=40", check=False)
            time.sleep(1)
        yield port
    finally:
        run("down", "--volumes", "--timeout", "20", check=False)


async def test_the_containers_answer_through_the_published_port(port: int) -> None:
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        answer = await client.ask(PICTURE, QUESTION, options=Options(timeout_s=60, degrade=False))
    assert answer.text == ANSWER
    assert answer.stages["encode"] > 0


@pytest.mark.parametrize("service", SERVICES)
def test_no_container_runs_as_root(port: int, service: str) -> None:
    identity = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{.Config.User}}", f"triptych-{service}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert identity.stdout.strip() not in ("", "root", "0")


def test_the_router_image_has_no_torch(port: int) -> None:
    command = ["docker", "run", "--rm", "triptych-router", "python3", "-c", "import torch"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0 and "No module named 'torch'" in result.stderr
