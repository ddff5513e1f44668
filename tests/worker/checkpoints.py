"""Tiny LLaVA-format checkpoints with random weights, and Hugging Face's view of a checkpoint as the reference."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

SPECIALS = ("<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<image>")
TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- '<image>' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{{- '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Tokenizer:
    """Writes a byte-level tokenizer without merges: every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(content, normalized=False, special=True) for content in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def write_checkpoint(
    folder: Path, seed: int = 0, shard_size: str = "5GB", text_model: str = "llama", **text_overrides: Any
) -> Path:
    """Writes a checkpoint of a few hundred kilobytes. Weights are large enough for logits to be well apart."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(folder)
    shape: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": SPECIALS.index("<|end|>"),
        "bos_token_id": None,
        "pad_token_id": 0,
        **text_overrides,
    }
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=7
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=AutoConfig.for_model(text_model, **shape),
        image_token_index=SPECIALS.index("<image>"),
        vision_feature_layer=-1,
        tie_word_embeddings=shape.get("tie_word_embeddings", False),
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):  # They start at zero, which would hide it if nobody added them.
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


class Reference:
    """Hugging Face transformers in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.side = self.model.config.vision_config.image_size

    def picture(self, seed: int) -> Tensor:
        """Returns random pixels [1, 3, side, side]."""
        return torch.randn(1, 3, self.side, self.side, generator=torch.Generator().manual_seed(seed))

    @torch.inference_mode()
    def features(self, pixels: Tensor) -> Tensor:
        """Returns the model's own projected features of a picture, [tokens, hidden]."""
        features: Tensor = self.model.model.get_image_features(pixels, return_dict=True).pooler_output[0]
        return features

    @torch.inference_mode()
    def generate(
        self, token_ids: tuple[int, ...], pictures: list[Tensor], max_tokens: int, **options: Any
    ) -> list[int]:
        """Returns the greedy continuation, a final end-of-sequence token included. `options` are `generate`'s."""
        inputs = torch.tensor([token_ids])
        shown = {"pixel_values": torch.cat(pictures)} if pictures else {}
        mask = torch.ones_like(inputs)
        output = self.model.generate(
            input_ids=inputs, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, **shown, **options
        )
        return [int(token) for token in output[0, len(token_ids) :]]

    @torch.inference_mode()
    def logits(self, token_ids: list[int], features: list[Tensor]) -> Tensor:
        """Returns logits [tokens, vocabulary] of a whole sequence."""
        ids = torch.tensor([token_ids])
        embedded = self.model.get_input_embeddings()(ids).clone()
        if features:
            rows = torch.cat(features)
            # A model may also generate the placeholder, which is then a token like any other.
            places = (ids[0] == self.model.config.image_token_index).nonzero()[: len(rows), 0]
            embedded[0, places] = rows
        logits: Tensor = self.model(inputs_embeds=embedded).logits[0]
        return logits


def write_text_only(folder: Path) -> Path:
    """Writes a Llama without a tower."""
    folder.mkdir()
    vocabulary = write_tokenizer(folder).get_vocab_size()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
