"""The OpenAPI document says what the gateway does, and schemathesis finds nothing that it does not say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.gateway.conftest import Rig
from tests.gateway.fakes import MODEL
from triptych.gateway.replies import ChatCompletion, Completion

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


async def test_every_route_is_described_with_its_errors(rig: Rig) -> None:
    document: dict[str, Any] = (await rig.http.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/health",
        "/ready",
        "/metrics",
    }
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["summary"]
            assert "422" not in operation["responses"], path
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "404", "408", "413", "429", "500", "503", "504"} == set(chat)
    assert set(chat["200"]["content"]) == {"application/json", "text/event-stream"}


async def test_replies_have_no_member_that_the_document_lacks(rig: Rig) -> None:
    chat = (await rig.chat(n=2, logprobs=True, top_logprobs=2)).json()
    assert ChatCompletion.model_validate(chat).model_dump() == chat
    body = {"model": MODEL, "prompt": "hello", "logprobs": 2}
    completion = (await rig.http.post("/v1/completions", json=body)).json()
    assert Completion.model_validate(completion).model_dump() == completion


@pytest.mark.slow
def test_schemathesis_runs_clean(tmp_path: Path) -> None:
    """Against a process of its own: hundreds of requests, valid and not, for every route."""
    command = [sys.executable, "-m", "tests.gateway.serve_fake"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        url = serving.stdout.readline().strip()
        document = httpx2.get(f"{url}/openapi.json", trust_env=False).json()
        # Else nearly every request would end at a model that does not exist.
        for body in ("ChatCompletionRequest", "CompletionRequest"):
            document["components"]["schemas"][body]["properties"]["model"] = {"const": MODEL}
        (tmp_path / "openapi.json").write_text(json.dumps(document))
        try:
            result = subprocess.run(
                [
                    *(SCHEMATHESIS, "run", "openapi.json", "--url", url, "--seed", "7", "--max-examples", "12"),
                    *("--phases", "examples,coverage,fuzzing,stateful", "--generation-database", "none"),
                    # Valid by its schema is not yet a picture that is allowed, or a member that is supported.
                    *("--exclude-checks", "positive_data_acceptance"),
                ],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                timeout=240,
                check=False,
            )
        finally:
            serving.terminate()
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
