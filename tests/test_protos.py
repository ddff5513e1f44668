"""The contracts: stubs are current, every field is documented, enums start at zero."""

import importlib.util
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

from triptych.v1 import generation_pb2, inference_pb2, tensor_pb2, worker_pb2

ROOT = Path(__file__).parents[1]
FILES = [generation_pb2.DESCRIPTOR, inference_pb2.DESCRIPTOR, tensor_pb2.DESCRIPTOR, worker_pb2.DESCRIPTOR]


def test_the_checked_in_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(tmp_path)
    fresh = {path.name: path.read_text() for path in (tmp_path / "triptych" / "v1").glob("*.py*")}
    kept = {path.name: path.read_text() for path in (ROOT / "services" / "triptych" / "v1").glob("*.py*")}
    assert fresh == kept, "run `make protos`"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "protos" / "triptych" / "v1").glob("*.proto")), ids=lambda path: path.name
)
def test_every_declaration_in_a_proto_file_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    declaration = re.compile(r"\s*(message|enum|service|rpc|oneof)\b|\s*[\w.<>, ]+ \w+ = \d+;")
    bare = [
        f"{number + 1}: {line.strip()}"
        for number, line in enumerate(lines)
        if declaration.match(line) and not lines[number - 1].strip().startswith("//")
    ]
    assert not bare


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_enum_starts_with_an_unspecified_zero(file: FileDescriptor) -> None:
    for enum in file.enum_types_by_name.values():
        first = enum.values[0]
        assert first.number == 0 and first.name.endswith("_UNSPECIFIED"), enum.full_name
