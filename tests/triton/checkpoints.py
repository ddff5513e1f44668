"""Tiny LLaVA-format checkpoints with random weights, and what transformers computes from them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

HIDDEN = 48


def write_checkpoint(folder: Path, seed: int = 0, **llava: Any) -> Path:
    """Writes a checkpoint of two layers of 32 at 112 px, patch 14; `llava` goes into LlavaConfig."""
    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=112,
        patch_size=14,
        initializer_factor=4.0,  # Large enough that every part of the graph shows in the output.
    )
    text = LlamaConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=3, **llava)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    preprocessor = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.3, 0.2, 0.1], "resample": 2, "do_rescale": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


def respell_for_hub(source: Path, target: Path) -> Path:
    """Copies a checkpoint with the tower's weights named as on the hub."""
    target.mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    weights = load_file(source / "model.safetensors")
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model.", 1) if "vision_model" not in name else name: tensor
        for name, tensor in weights.items()
    }
    save_file(renamed, target / "model.safetensors", {"format": "pt"})
    return target


def reference_features(checkpoint: Path, pixels: torch.Tensor) -> torch.Tensor:
    """Returns transformers' projected features: [batch, tokens, hidden]."""
    model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        features = model.get_image_features(
            pixels,
            vision_feature_layer=model.config.vision_feature_layer,
            vision_feature_select_strategy=model.config.vision_feature_select_strategy,
            interpolate_pos_encoding=True,
        ).pooler_output
    return torch.stack(tuple(features))
