"""A small LLaVA checkpoint, made as `triptych bench model` makes the large ones."""

import json
from pathlib import Path

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from triptych.bench.engine.vision_checkpoint import IMAGE_TOKEN, write_llava
from triptych.config import bundled

TOWER = CLIPVisionConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=56, patch_size=14
)
VISUAL_TOKENS = 16


def write_language_model(folder: Path) -> Path:
    """Writes a tiny Llama that knows no image."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(bundled("models/demo") / "tokenizer.json"))
    torch.manual_seed(5)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)
    description = json.loads(tokenizer.backend_tokenizer.to_str().replace(IMAGE_TOKEN, "<unused>"))
    (folder / "tokenizer.json").write_text(json.dumps(description))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def write_small_llava(folder: Path) -> Path:
    """Writes that Llama behind TOWER."""
    write_llava(folder / "llava", write_language_model(folder), TOWER)
    return folder / "llava"
