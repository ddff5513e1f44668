"""`triptych bench model`: the checkpoints that pictures are measured with, at a small size."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from triptych.bench.engine.checkpoint import MODELS, bench_checkpoint
from triptych.bench.engine.vision_checkpoint import IMAGE_TOKEN, TOWERS, write_llava
from triptych.config import bundled
from triptych.errors import InvalidRequest
from triptych.vision.export_checkpoint import read_checkpoint
from triptych.worker.model.config import load_model_config
from triptych.worker.model.weights import load_decoder_weights
from triptych.worker.prompt import ImageSlot, PromptEncoder, Turn

TOWER = CLIPVisionConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=56, patch_size=14
)
VISUAL_TOKENS = 16


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
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
    # As that of a language model: it knows no image.
    description = json.loads(tokenizer.backend_tokenizer.to_str().replace(IMAGE_TOKEN, "<unused>"))
    (folder / "tokenizer.json").write_text(json.dumps(description))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="module")
def checkpoint(language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    write_llava(folder, language_model, TOWER)
    return folder


def test_transformers_loads_every_weight_and_answers_about_a_picture(checkpoint: Path) -> None:
    model, loading = LlavaForConditionalGeneration.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(loading.values())
    processor = AutoProcessor.from_pretrained(checkpoint)
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(images=Image.new("RGB", (90, 60)), text=text, return_tensors="pt")
    assert (inputs.input_ids == model.config.image_token_index).sum() == VISUAL_TOKENS
    answer = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert answer.shape[1] == inputs.input_ids.shape[1] + 4


def test_the_worker_and_the_export_read_it(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)
    assert config.decoder.vocabulary % 64 == 0
    load_decoder_weights(checkpoint, config.decoder, torch.device("cpu"), torch.float32)
    vision = read_checkpoint(checkpoint)
    assert vision.preprocessing.image_side == TOWER.image_size and vision.feature_layers == (2,)
    prompts = PromptEncoder(checkpoint, config.image_token_id)
    prompt = prompts.encode([Turn("user", (ImageSlot(bytes(32), VISUAL_TOKENS), "what is it?"))])
    assert [span.count for span in prompt.spans] == [VISUAL_TOKENS]


def test_a_row_that_was_added_is_never_the_likeliest_token(checkpoint: Path) -> None:
    embedding = load_file(checkpoint / "model.safetensors")["language_model.model.embed_tokens.weight"].float()
    known = json.loads((checkpoint / "tokenizer.json").read_text())["added_tokens"][-1]["id"]
    hidden = torch.randn(500, embedding.shape[1], generator=torch.Generator().manual_seed(0))
    assert (hidden @ embedding.T).argmax(-1).max() < known


def test_equal_seeds_give_equal_weights_and_tensors_are_named_as_on_the_hub(
    language_model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    write_llava(tmp_path / "again", language_model, TOWER)
    write_llava(tmp_path / "other", language_model, TOWER, seed=1)
    first, again, other = (
        load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "again", tmp_path / "other")
    )
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    name = "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"
    assert not torch.equal(first[name], other[name])
    assert {name.split(".")[0] for name in first} == {"vision_tower", "multi_modal_projector", "language_model"}


def test_the_towers_give_576_and_196_visual_tokens() -> None:
    tokens = {name: (tower.image_size // tower.patch_size) ** 2 for name, tower in TOWERS.items()}
    assert tokens == {"llava-vit-l-14-336": 576, "llava-vit-b-16-224": 196}
    assert set(tokens) < set(MODELS)


def test_an_unknown_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="smollm2-135m"):
        bench_checkpoint("gpt", tmp_path)
