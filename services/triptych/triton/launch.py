"""The command line and environment of a tritonserver, as a value."""

import os
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.config import TritonSettings
from triptych.errors import Unavailable
from triptych.triton.backends import check_stub, has_onnxruntime, prepare_backends
from triptych.triton.install import STUB, Installation, find_installation, server_environment

SPAN_DELAY_MS = 300
"""How long Triton collects spans before it exports them; its default of 5 s would leave a short run without any."""

EXIT_TIMEOUT_S = 5
"""How long Triton waits for running requests when it is told to stop."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one tritonserver.

    Attributes:
        argv: Program and arguments.
        env: The whole environment of the process.
        shm_prefix: First part of the names of its regions under /dev/shm; a killed server leaves them behind.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    shm_prefix: str


def plan_launch(settings: TritonSettings, workdir: Path) -> Launch:
    """Returns how to start Triton; starts nothing and writes only below `workdir`, which must outlive the server.

    Its spans go straight to the settings' trace_url: `relay.linked_traces` makes settings that have them linked first.
    Raises Unavailable when there is no tritonserver, its Python stub cannot start, or there is no model repository.
    """
    if not settings.model_repository.is_dir():
        raise Unavailable(
            f"model repository {settings.model_repository} does not exist; write one with "
            "`triptych export MODEL_DIR`, or set TRIPTYCH_TRITON_MODEL_REPOSITORY",
            reason="MODEL_REPOSITORY_MISSING",
        )
    installation = find_installation(settings.tritonserver)
    environment = server_environment(installation, os.environ)
    backends = prepare_backends(installation, workdir / "backends")
    python_based = not has_onnxruntime(installation)
    if python_based:
        check_stub(backends / "python" / STUB, environment)
    prefix = f"triptych-triton-{secrets.token_hex(4)}-"
    argv = [
        str(installation.server),
        f"--model-repository={settings.model_repository.absolute()}",
        f"--backend-directory={backends}",
        f"--grpc-address={settings.host}",
        f"--grpc-port={settings.grpc_port}",
        f"--http-address={settings.host}",
        f"--http-port={settings.http_port}",
        f"--metrics-address={settings.host}",
        f"--metrics-port={settings.metrics_port}",
        # A broken model must not take the others down; `wait_ready` reports it.
        "--exit-on-error=false",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        *_control_flags(settings),
        *_trace_flags(settings.trace_url),
        *([f"--backend-config=python,shm-region-prefix-name={prefix}"] if python_based else []),
    ]
    if "--allow-client-shm" in _help(installation, environment):  # Newer servers refuse it unless told.
        argv.append("--allow-client-shm=true")
    return Launch(tuple(argv), environment, prefix)


def _control_flags(settings: TritonSettings) -> list[str]:
    flags = [f"--model-control-mode={settings.control_mode}"]
    if settings.control_mode == "poll":
        flags.append(f"--repository-poll-secs={settings.poll_interval_s}")
    if settings.control_mode == "explicit":  # Start with what is there; from then on the operator decides.
        flags.append("--load-model=*")
    return flags


def _trace_flags(url: str | None) -> list[str]:
    if url is None:
        return []
    values = (
        "mode=opentelemetry",
        "rate=1",
        "level=TIMESTAMPS",
        f"opentelemetry,url={url}",
        "opentelemetry,resource=service.name=triton",
        f"opentelemetry,bsp_schedule_delay={SPAN_DELAY_MS}",
    )
    return [f"--trace-config={value}" for value in values]


def _help(installation: Installation, environment: Mapping[str, str]) -> str:
    """Returns the server's list of flags, or an empty text when it gives none."""
    try:
        run = subprocess.run(
            [installation.server, "--help"], env=environment, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout + run.stderr
