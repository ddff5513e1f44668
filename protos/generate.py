"""Generates services/triptych/v1 from protos/triptych/v1: messages, gRPC stubs and their types.

`python protos/generate.py [OUT]` writes below OUT (default: services/).
"""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent


def generate(out: Path) -> None:
    """Runs protoc for every file under protos/. Raises SystemExit with protoc's code when it fails."""
    sources = sorted(PROTOS.glob("triptych/v1/*.proto"))
    beside_python = Path(sys.executable).parent  # An interpreter run by its path has its scripts not on PATH.
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{files('grpc_tools') / '_proto'}",
        *(f"--plugin={plugin}={beside_python / plugin}" for plugin in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out={out}",
        f"--mypy_grpc_out={out}",
        *map(str, sources),
    ]
    if code := protoc.main(arguments):
        raise SystemExit(code)
    (out / "triptych" / "v1" / "__init__.py").write_text('"""Stubs generated from protos/ by `make protos`."""\n')


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS.parent / "services")
