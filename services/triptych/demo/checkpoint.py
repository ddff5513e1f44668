"""The demo model's shape, and how its checkpoint is written: Hugging Face's LLaVA format."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import torch
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from triptych.demo.drawing import NATIVE_SIZE
from triptych.demo.tokens import IMAGE, token_id

PATCH: Final = 14
VISION_WIDTH: Final = 128
TEXT_WIDTH: Final = 192


def vision_config(layers: int = 4) -> CLIPVisionConfig:
    """A CLIP tower of `layers` layers of 128 at 112 px: 64 patches."""
    return CLIPVisionConfig(
        hidden_size=VISION_WIDTH,
        intermediate_size=4 * VISION_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=NATIVE_SIZE,
        patch_size=PATCH,
        projection_dim=VISION_WIDTH,
    )


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaForConditionalGeneration:
    """The untrained model, fp32: about 2.3 M parameters, its weights set by `seed`."""
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlavaConfig(
        vision_config=vision_config(),
        text_config=text,
        image_token_index=token_id(tokenizer, IMAGE),
        image_seq_length=(NATIVE_SIZE // PATCH) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Text and image processing as any LLaVA client does it: shortest edge 112, centre crop, CLIP's normalisation."""
    images = CLIPImageProcessorPil(
        size={"shortest_edge": NATIVE_SIZE},
        crop_size={"height": NATIVE_SIZE, "width": NATIVE_SIZE},
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=tokenizer.chat_template,
    )


def save(folder: Path, *parts: PreTrainedModel | ProcessorMixin) -> None:
    """Writes each part's files into `folder`, replacing them one by one, so a reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        for part in parts:
            part.save_pretrained(scratch)
        for file in sorted(Path(scratch).iterdir()):
            file.chmod(0o644)
            file.replace(folder / file.name)
