"""Checkpoints and repositories that several modules share; making one takes seconds, so once per session."""

import shutil
from pathlib import Path

import pytest

from tests.triton.checkpoints import write_checkpoint
from triptych.config import TritonSettings
from triptych.ports import free_ports
from triptych.vision.export import export


def silent(line: str) -> None:
    """Takes export's progress."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("default") / "model", vision_feature_layer=-1, vision_feature_select_strategy="default"
    )


@pytest.fixture(scope="session")
def full_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("full") / "model",
        vision_feature_layer=-2,
        vision_feature_select_strategy="full",
        multimodal_projector_bias=False,
        projector_hidden_act="relu",
    )


@pytest.fixture(scope="session")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository made from `checkpoint`; tests that change it copy it."""
    repository = tmp_path_factory.mktemp("exported") / "model_repository"
    export(checkpoint, repository, progress=silent)
    return repository


@pytest.fixture
def settings(exported: Path, tmp_path: Path) -> TritonSettings:
    """A Triton on free ports over a copy of the exported repository."""
    shutil.copytree(exported, tmp_path / "model_repository")
    return settings_for(tmp_path / "model_repository")


def settings_for(repository: Path, **knobs: object) -> TritonSettings:
    grpc_port, http_port, metrics_port = free_ports(3)
    defaults: dict[str, object] = {
        "model_repository": repository,
        "grpc_port": grpc_port,
        "http_port": http_port,
        "metrics_port": metrics_port,
        "poll_interval_s": 1,
        "trace_url": None,
        "tritonserver": None,
    }
    return TritonSettings.model_validate(defaults | knobs)
