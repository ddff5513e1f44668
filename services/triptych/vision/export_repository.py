"""Triton's model repository: the texts of its configurations, and putting models into it in one step each.

Triton looks into the repository at any time. So a model's new folder is made elsewhere on the same file system,
complete, and exchanged with the old one by a single rename; at no moment is half a model, or none, in its place.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.errors import InvalidRequest

KEPT_VERSIONS = 2
"""Versions of the vision model that are served at the same time."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True, slots=True)
class TensorText:
    """An input or output as config.pbtxt has it; dims leave out the batch, -1 is dynamic."""

    name: str
    dims: tuple[int, ...]


def onnx_config(
    name: str,
    source: TensorText,
    target: TensorText,
    max_batch_size: int,
    timeout_ms: int = 60_000,
    max_queue_size: int = 256,
    cpu_accelerator: str | None = None,
) -> str:
    """Returns the config.pbtxt of an ONNX model that is batched dynamically and serves its two newest versions.

    Two, so that requests that began with the old one end with it, and going back is only a matter of names.

    `cpu_accelerator` is one that the server's onnxruntime has, "openvino"; without it the model still runs.

    Queue size and queue timeout are a safety net behind the caller's own limits. The thread counts are those of the
    C++ backend; 0 leaves the choice to it.
    """
    return f"""\
# Written by `triptych export`; a later export writes it again.
name: "{name}"
backend: "onnxruntime"
max_batch_size: {max_batch_size}
version_policy {{
  latest {{
    num_versions: {KEPT_VERSIONS}
  }}
}}
{_tensors("input", source)}
{_tensors("output", target)}
instance_group [
  {{
    count: 1
  }}
]
dynamic_batching {{
  max_queue_delay_microseconds: 500
  default_queue_policy {{
    timeout_action: REJECT
    default_timeout_microseconds: {timeout_ms * 1000}
    allow_timeout_override: true
    max_queue_size: {max_queue_size}
  }}
}}
{_parameter("intra_op_thread_count", "0")}
{_parameter("inter_op_thread_count", "0")}
{_accelerator(cpu_accelerator)}"""


def ensemble_config(
    name: str,
    models: tuple[str, str],
    source: TensorText,
    between: TensorText,
    target: TensorText,
    max_batch_size: int,
    parameters: Mapping[str, str],
    version: int = -1,
) -> str:
    """Returns the config.pbtxt of an ensemble that runs the first model, then the second, inside Triton.

    `version` is that of both models; -1: whichever is the newest at the moment.
    """
    first, second = models
    return f"""\
# Written by `triptych export`; a later export writes it again.
name: "{name}"
platform: "ensemble"
max_batch_size: {max_batch_size}
{_tensors("input", source)}
{_tensors("output", target)}
ensemble_scheduling {{
  step [
    {_step(first, version, source.name, source.name, between.name, between.name)},
    {_step(second, version, between.name, between.name, target.name, target.name)}
  ]
}}
{chr(10).join(_parameter(key, value) for key, value in parameters.items())}
"""


def _tensors(kind: str, tensor: TensorText) -> str:
    dims = ", ".join(str(size) for size in tensor.dims)
    return f"""{kind} [
  {{
    name: "{tensor.name}"
    data_type: TYPE_FP32
    dims: [ {dims} ]
  }}
]"""


def _accelerator(name: str | None) -> str:
    if name is None:
        return ""
    return f"""optimization {{
  execution_accelerators {{
    cpu_execution_accelerator [
      {{
        name: "{name}"
      }}
    ]
  }}
}}
"""


def _step(model: str, version: int, input_name: str, input_value: str, output_name: str, output_value: str) -> str:
    return f"""{{
      model_name: "{model}"
      model_version: {version}
      input_map {{
        key: "{input_name}"
        value: "{input_value}"
      }}
      output_map {{
        key: "{output_name}"
        value: "{output_value}"
      }}
    }}"""


def _parameter(key: str, value: str) -> str:
    # JSON's escapes are a subset of protobuf text format's.
    return f"parameters {{\n  key: {json.dumps(key)}\n  value {{\n    string_value: {json.dumps(value)}\n  }}\n}}"


@contextlib.contextmanager
def staging_area(repository: Path) -> Iterator[Path]:
    """Yields an empty folder on the repository's file system but outside it, and removes it in the end.

    Creates the repository if it is not there. Raises InvalidRequest (REPOSITORY_NOT_WRITABLE).
    """
    try:
        repository.mkdir(parents=True, exist_ok=True)
        place = repository.resolve().parent
        # A repository that is a mount point has no such place beside it; Triton takes a hidden folder inside for a
        # model that cannot be loaded, and says so in its log until the export is done.
        if place.stat().st_dev != repository.stat().st_dev or not os.access(place, os.W_OK):
            place = repository
        area = tempfile.mkdtemp(prefix=f".{repository.name}-export-", dir=place)
        if not os.access(repository, os.W_OK):
            os.rmdir(area)  # noqa: PTH106
            raise PermissionError(errno.EACCES, "not writable")
    except OSError as error:
        raise InvalidRequest(
            f"cannot write the model repository {repository}: {error.strerror}", reason="REPOSITORY_NOT_WRITABLE"
        ) from error
    try:
        yield Path(area)
    finally:
        shutil.rmtree(area, ignore_errors=True)


def stage_model(area: Path, repository: Path, name: str, version: int, config: str) -> Path:
    """Makes a model's next folder in `area`: its config, its other versions, and an empty folder for this version.

    Returns the version's folder. Other versions are linked, not copied, where the file system can.
    """
    staged = area / name
    present = repository / name
    if present.is_dir():
        shutil.copytree(
            present,
            staged,
            ignore=lambda folder, _: [str(version), "config.pbtxt"] if Path(folder) == present else [],
            copy_function=_link_or_copy,
        )
    else:
        staged.mkdir()
    (staged / "config.pbtxt").write_text(config, encoding="utf-8")
    (staged / str(version)).mkdir()
    return staged / str(version)


def versioned_ensembles(repository: Path, model: str) -> set[int]:
    """Returns the versions of a vision model that have an ensemble of their own in the repository."""
    pattern = re.compile(rf"{re.escape(model)}_v([0-9]+)")
    return {int(match[1]) for entry in repository.iterdir() if (match := pattern.fullmatch(entry.name))}


def publish(area: Path, repository: Path, names: tuple[str, ...]) -> None:
    """Puts the staged models into the repository, in order; on an error those already in place go back.

    A model that is not staged is taken out of the repository.
    """
    done: list[str] = []
    try:
        for name in names:
            _swap(area / name, repository / name)
            done.append(name)
    except BaseException:
        for name in reversed(done):
            _swap(area / name, repository / name)
        raise


def _swap(staged: Path, target: Path) -> None:
    """Exchanges two folders atomically, or moves `staged` (or back) where only one of the two exists."""
    if staged.exists() and target.exists():
        if not _exchange(staged, target):  # No such call here: there is a moment without the model.
            aside = staged.with_name(f"{staged.name}.old")
            target.rename(aside)
            staged.rename(target)
            aside.rename(staged)
    elif staged.exists():
        staged.rename(target)
    else:
        target.rename(staged)


def _exchange(first: Path, second: Path) -> bool:
    """Tries Linux's renameat2 with RENAME_EXCHANGE; returns whether it was done."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    done: int = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return done == 0


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
