"""Checkpoints that pictures are measured with: a CLIP tower of realistic shape in front of SmolLM2, as LLaVA has it.

The tower's and the projector's weights are random, so the answers mean nothing; they take as long as any other's.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerBase,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from triptych.bench.engine.checkpoint import written_at_once

IMAGE_TOKEN = "<image>"

TOWERS = {
    "llava-vit-l-14-336": CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    ),
    "llava-vit-b-16-224": CLIPVisionConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        image_size=224,
        patch_size=16,
        projection_dim=512,
    ),
}
"""CLIP's towers by the checkpoint's name: 576 and 196 visual tokens."""

# As LLaVA-1.5: the output of the last layer but one, without the class token.
FEATURE_LAYER, SELECT_STRATEGY = -2, "default"

# SmolLM2's own, but with messages that may be lists of parts.
CHAT_TEMPLATE = """\
{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' }}{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}{{ \
'<|im_end|>
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

_ROWS_MULTIPLE = 64


def write_llava(folder: Path, language_model: Path, vision: CLIPVisionConfig, seed: int = 0) -> None:
    """Writes a LLaVA-format checkpoint in bfloat16, its tensors named as on the hub.

    `language_model` is a Llama-format folder whose tokenizer has no image token yet; one is added, and rows of the
    embedding up to a multiple of 64, as in LLaVA-1.5. Equal seeds give equal weights.
    """
    tokenizer = AutoTokenizer.from_pretrained(language_model)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    text = LlamaConfig.from_pretrained(language_model)
    text.vocab_size = -(-len(tokenizer) // _ROWS_MULTIPLE) * _ROWS_MULTIPLE
    config = LlavaConfig(
        vision_config=vision,
        text_config=_plain(text),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=(vision.image_size // vision.patch_size) ** 2,
        vision_feature_layer=FEATURE_LAYER,
        vision_feature_select_strategy=SELECT_STRATEGY,
        tie_word_embeddings=text.tie_word_embeddings,
        architectures=["LlavaForConditionalGeneration"],
        dtype="bfloat16",
    )
    weights = dict(_language_weights(language_model, text.vocab_size))
    weights |= _vision_weights(vision, text.hidden_size, seed)
    with written_at_once(folder) as scratch:
        config.save_pretrained(scratch)
        processor = _processor(tokenizer, vision)
        processor.save_pretrained(scratch)
        # OpenVINO GenAI reads no other file, and divides by a deviation of zero without it.
        processor.image_processor.save_pretrained(scratch)
        generation = language_model / "generation_config.json"
        if generation.is_file():
            (scratch / generation.name).write_bytes(generation.read_bytes())
        save_file(weights, scratch / "model.safetensors", {"format": "pt"})


def _plain(text: LlamaConfig) -> dict[str, object]:
    """Returns the configuration without what only the GGUF file it came from had."""
    fields: dict[str, object] = text.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures", "transformers_version"):
        fields.pop(name, None)
    return fields


def _language_weights(folder: Path, rows: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the language model's weights by their LLaVA names, the embedding grown to `rows`.

    New rows are the mean of the others: their logit is a mean, too, and so is never the largest.
    """
    for name, tensor in load_file(folder / "model.safetensors").items():
        grown = tensor.to(torch.bfloat16)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            mean = tensor.float().mean(0, keepdim=True).to(torch.bfloat16)
            grown = torch.cat([grown, mean.expand(rows - len(tensor), -1)])
        yield f"language_model.{name}", grown.contiguous()


def _vision_weights(vision: CLIPVisionConfig, hidden: int, seed: int) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tower = CLIPVisionModel(vision)
        projector = nn.ModuleDict(
            {"linear_1": nn.Linear(vision.hidden_size, hidden), "linear_2": nn.Linear(hidden, hidden)}
        )
    # transformers has moved the tower's parts in and out of `vision_model`; the hub has them inside.
    named = {
        f"vision_tower.vision_model.{name.removeprefix('vision_model.')}": value
        for name, value in tower.state_dict().items()
        if not name.endswith("position_ids")
    }
    named |= {f"multi_modal_projector.{name}": value for name, value in projector.state_dict().items()}
    return {name: value.to(torch.bfloat16).contiguous() for name, value in named.items()}


def _processor(tokenizer: PreTrainedTokenizerBase, vision: CLIPVisionConfig) -> LlavaProcessor:
    side = vision.image_size
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
        tokenizer=tokenizer,
        patch_size=vision.patch_size,
        vision_feature_select_strategy=SELECT_STRATEGY,
        num_additional_image_tokens=1,
        image_token=IMAGE_TOKEN,
        chat_template=CHAT_TEMPLATE,
    )
