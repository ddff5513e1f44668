"""Asks a running Triton, over its HTTP port, whether it is ready and, if not, why."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from triptych.errors import Unavailable

# A proxy from the environment must never come between services.
_PENDING = "nv_inference_pending_request_count"

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def wait_ready(
    address: str,
    timeout_s: float,
    alive: Callable[[], bool] = lambda: True,
    last_lines: Callable[[], list[str]] = list,
) -> None:
    """Returns once every model of the Triton at `address` (host:http_port) is ready.

    Raises Unavailable as soon as `alive()` is false (TRITON_DIED) or a model has failed to load (MODEL_LOAD_FAILED,
    with Triton's reason), and after `timeout_s` (TRITON_START_TIMEOUT). The message ends with `last_lines()`.
    """
    deadline = time.monotonic() + timeout_s
    while not is_ready(address):
        if not alive():
            raise _failure("tritonserver has ended before it was ready", "TRITON_DIED", last_lines())
        failures = broken_models(address)
        if failures:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
            raise _failure(f"Triton cannot load its models: {reasons}", "MODEL_LOAD_FAILED", last_lines())
        if time.monotonic() >= deadline:
            raise _failure(
                f"Triton at {address} was not ready within {timeout_s:g} s (TRIPTYCH_TRITON_START_TIMEOUT_S)",
                "TRITON_START_TIMEOUT",
                last_lines(),
            )
        time.sleep(0.1)


def is_ready(address: str) -> bool:
    """Tells whether the server answers and all its models are ready; never raises."""
    try:
        with _opener.open(f"http://{address}/v2/health/ready", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:  # Refused, timed out, or HTTP 400: urllib's errors are OSErrors.
        return False


def broken_models(address: str) -> dict[str, str]:
    """Returns why models failed to load, by name; empty while any is still loading or nobody answers."""
    models = repository_index(address)
    states = [model.get("state") for model in models]
    if "LOADING" in states:
        return {}
    ready = {model["name"] for model in models if model.get("state") == "READY"}
    return {
        model["name"]: model.get("reason") or "no reason given"
        for model in models
        # An older version that was replaced is UNAVAILABLE too, beside a READY one.
        if model.get("state") == "UNAVAILABLE" and model["name"] not in ready
    }


def broken_versions(address: str, patience_s: float = 0.0) -> dict[str, str]:
    """Returns why versions cannot be loaded, by model and version ("vision_encoder v2"), whether or not another serves.

    In poll mode Triton tries again and again and meanwhile forgets the reason, so the question is repeated for as long
    as patience_s. A model that Triton does not even try, because one that it needs is broken, is named, too.
    """
    deadline = time.monotonic() + patience_s
    models = repository_index(address)
    while any(model.get("state") == "LOADING" for model in models) and time.monotonic() < deadline:
        time.sleep(0.05)
        models = repository_index(address)
    broken = {}
    for model in models:
        name = f"{model['name']} v{model['version']}" if model.get("version") else str(model["name"])
        reason = str(model.get("reason") or "")
        if model.get("state") == "UNAVAILABLE" and reason != "unloaded":
            broken[name] = reason.partition("\n")[0] or "no reason given"
        elif "state" not in model:
            broken[name] = "not loaded; a model that it needs may be broken"
    return broken


def repository_index(address: str) -> list[dict[str, Any]]:
    """Returns Triton's list of models and versions with their states; empty when nobody answers."""
    request = urllib.request.Request(f"http://{address}/v2/repository/index", data=b"{}", method="POST")
    try:
        with _opener.open(request, timeout=2) as response:
            models: list[dict[str, Any]] = json.load(response)
    except (OSError, ValueError):
        return []
    return models


def pending_requests(metrics_address: str, timeout_s: float = 2.0) -> int:
    """Returns how many requests wait in a Triton, by its metrics at host:port; 0 where it does not tell."""
    try:
        with _opener.open(f"http://{metrics_address}/metrics", timeout=timeout_s) as response:
            lines = response.read().decode("utf-8", "replace").splitlines()
        counts = [line.rpartition(" ")[2] for line in lines if line.startswith(_PENDING)]
        return int(max(map(float, counts), default=0.0))
    except (OSError, ValueError):
        return 0


def _failure(what: str, reason: str, lines: list[str]) -> Unavailable:
    tail = "".join(f"\n  {line}" for line in lines[-20:])
    return Unavailable(what + (f"; its last lines:{tail}" if tail else ""), reason=reason)
