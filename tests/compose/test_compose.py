"""The containers, for real: built, started, asked from outside through the published port."""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from triptych.client import AsyncClient, Options
from triptych.demo import ANSWER, PICTURE, QUESTION
from triptych.http_health import answers_ok
from triptych.ports import free_ports

pytestmark = [pytest.mark.compose, pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
PROJECT = "triptych-test"
SERVICES = ("triton", "worker", "router", "gateway")


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


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the containers are reached from outside."""

    grpc: int
    http: int


@pytest.fixture(scope="module")
def ports() -> Iterator[Ports]:
    compose = [*compose_command(), "-p", PROJECT]
    if not have_base_image():
        pytest.skip("the base image python:3.11-slim-bookworm is neither here nor can it be pulled")
    port, http_port = free_ports(2)
    environment = {
        **os.environ,
        "TRIPTYCH_ROUTER_PORT": str(port),
        "TRIPTYCH_GATEWAY_PORT": str(http_port),
        # Jaeger's image is not needed to answer: only our own are started.
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
        while not asyncio.run(answers_ok(f"http://127.0.0.1:{http_port}/ready")):
            assert time.monotonic() < deadline, run("logs", "--tail=40", check=False)
            time.sleep(1)
        yield Ports(port, http_port)
    finally:
        run("down", "--volumes", "--timeout", "20", check=False)


async def test_the_containers_answer_through_the_published_ports(ports: Ports) -> None:
    async with AsyncClient(f"127.0.0.1:{ports.grpc}") as client:
        answer = await client.ask(PICTURE, QUESTION, options=Options(timeout_s=60, degrade=False))
    assert answer.text == ANSWER
    assert answer.stages["encode"] > 0
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{ports.http}/v1", api_key="none") as http:
        messages: Any = [{"role": "user", "content": "is there a circle?"}]
        reply = await http.chat.completions.create(model="demo", messages=messages, temperature=0)
    assert reply.choices[0].message.content


@pytest.mark.parametrize("service", SERVICES)
def test_no_container_runs_as_root(ports: Ports, service: str) -> None:
    identity = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{.Config.User}}", f"triptych-{service}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert identity.stdout.strip() not in ("", "root", "0")


@pytest.mark.parametrize("service", ["router", "gateway"])
def test_the_images_in_front_have_no_torch(ports: Ports, service: str) -> None:
    command = ["docker", "run", "--rm", f"triptych-{service}", "python3", "-c", "import torch"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0 and "No module named 'torch'" in result.stderr
