"""`triptych bench model`: the checkpoints that pictures are measured with, at a small size."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor, LlavaForConditionalGeneration

from tests.bench.llava import TOWER, VISUAL_TOKENS, write_language_model, write_small_llava
from triptych.bench.engine.checkpoint import MODELS, bench_checkpoint
from triptych.bench.engine.vision_checkpoint import TOWERS, write_llava
from triptych.errors import InvalidRequest
from triptych.vision.export_checkpoint import read_checkpoint
from triptych.worker.model.config import load_model_config
from triptych.worker.model.weights import load_decoder_weights
from triptych.worker.prompt import ImageSlot, PromptEncoder, Turn


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llava(tmp_path_factory.mktemp("small"))


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


def test_equal_seeds_give_equal_weights_and_tensors_are_named_as_on_the_hub(checkpoint: Path, tmp_path: Path) -> None:
    language_model = write_language_model(tmp_path)
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
