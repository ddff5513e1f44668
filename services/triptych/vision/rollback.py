"""`triptych rollback`: takes a version of the vision model out of a repository, so that the one before serves again."""

import shutil
from pathlib import Path

from triptych.errors import InvalidRequest
from triptych.vision.encoder_spec import versioned_name
from triptych.vision.export import ENCODER, ENSEMBLE, PROJECTOR
from triptych.vision.export_repository import publish, staging_area, versioned_ensembles


def rollback(repository: Path, version: int | None = None) -> tuple[int, int]:
    """Removes `version` (None: the newest) and returns it with the newest that is left.

    The version's own ensemble goes first: the router then asks for the one before, and what it has asked for already is
    finished. Each model changes in one step. Raises InvalidRequest (VERSION_UNKNOWN) when there is no such version, or
    no other.
    """
    versions = versioned_ensembles(repository, ENSEMBLE) if repository.is_dir() else set()
    removed = max(versions, default=0) if version is None else version
    if removed not in versions or len(versions) < 2:
        known = ", ".join(map(str, sorted(versions))) or "none"
        raise InvalidRequest(
            f"{repository} has the versions {known}: "
            + ("no other would be left" if removed in versions else f"{removed} is not among them"),
            reason="VERSION_UNKNOWN",
        )
    left = max(versions - {removed})
    with staging_area(repository) as area:
        for name in (ENSEMBLE, ENCODER, PROJECTOR):
            shutil.copytree(repository / name, area / name)
            shutil.rmtree(area / name / str(removed), ignore_errors=True)
        config = (repository / versioned_name(ENSEMBLE, left) / "config.pbtxt").read_text(encoding="utf-8")
        config = config.replace(f'"{versioned_name(ENSEMBLE, left)}"', f'"{ENSEMBLE}"')
        config = config.replace(f"model_version: {left}\n", "model_version: -1\n")
        (area / ENSEMBLE / "config.pbtxt").write_text(config, encoding="utf-8")
        publish(area, repository, (versioned_name(ENSEMBLE, removed), ENSEMBLE, ENCODER, PROJECTOR))
    return removed, left
