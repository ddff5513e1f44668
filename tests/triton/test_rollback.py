import shutil
from pathlib import Path

import pytest

from triptych.errors import InvalidRequest
from triptych.vision.rollback import rollback


@pytest.fixture
def repository(exported: Path, tmp_path: Path) -> Path:
    """A repository with two versions, the second a copy of the first."""
    repository = Path(shutil.copytree(exported, tmp_path / "repository"))
    for name in ("vision_encoder", "projector", "vision"):
        shutil.copytree(repository / name / "1", repository / name / "2")
    shutil.copytree(repository / "vision_v1", repository / "vision_v2")
    return repository


def names(repository: Path) -> set[str]:
    return {str(path.relative_to(repository)) for path in repository.glob("*/[0-9]*")}


def test_an_export_makes_an_ensemble_that_names_its_versions(exported: Path) -> None:
    assert (exported / "vision_v1" / "config.pbtxt").read_text().count("model_version: 1\n") == 2
    assert (exported / "vision" / "config.pbtxt").read_text().count("model_version: -1\n") == 2


def test_a_rollback_takes_the_newest_version_out_and_leaves_the_other_as_it_was(
    repository: Path, exported: Path
) -> None:
    (repository / "vision" / "config.pbtxt").write_text("of version 2")
    assert rollback(repository) == (2, 1)
    assert names(repository) == names(exported)
    for path in exported.rglob("*.*"):
        if path.is_file():
            assert (repository / path.relative_to(exported)).read_bytes() == path.read_bytes()
    assert [entry.name for entry in repository.parent.iterdir()] == ["repository"]


def test_the_older_of_two_versions_can_be_taken_out(repository: Path) -> None:
    assert rollback(repository, 1) == (1, 2)
    assert "vision_encoder/2" in names(repository) and "vision_encoder/1" not in names(repository)


def test_the_last_version_and_an_unknown_one_stay(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="7 is not among them"):
        rollback(repository, 7)
    rollback(repository)
    with pytest.raises(InvalidRequest, match="no other would be left"):
        rollback(repository)
    with pytest.raises(InvalidRequest) as caught:
        rollback(tmp_path / "nowhere")
    assert caught.value.reason == "VERSION_UNKNOWN"
