"""A LLaVA checkpoint of other dimensions, exported and served by the commands alone, equals transformers."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tests.stack.conftest import START_TIMEOUT_S, environment_of, start_up
from triptych.client import Client, Options
from triptych.config import bundled
from triptych.demo import PICTURE
from triptych.stack import StackSettings

pytestmark = pytest.mark.integration

QUESTIONS = ["what is it?", "Where is the red circle, and why?", "héllo 🙂 wörld", "count to three"]
NEW_TOKENS = 16
SIDE = 64
PATCH = 16


def write_checkpoint(folder: Path) -> LlavaForConditionalGeneration:
    """Writes random weights of an unusual shape: patch 16, class token kept, an inner feature layer, untied head."""
    demo = bundled("models/demo")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, folder / name)
    demo_config = json.loads((demo / "config.json").read_text())
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=3, image_size=SIDE,
            patch_size=PATCH,
        ).to_dict(),
        text_config=LlamaConfig(
            hidden_size=80, intermediate_size=160, num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=1,
            head_dim=16, vocab_size=demo_config["text_config"]["vocab_size"], max_position_embeddings=512,
            tie_word_embeddings=False, eos_token_id=demo_config["text_config"]["eos_token_id"],
        ).to_dict(),
        image_token_index=demo_config["image_token_index"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="full",
        image_seq_length=(SIDE // PATCH) ** 2 + 1,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # Spread the logits, so that no argmax is a near-tie.
            parameter.mul_(3.0)
    model.generation_config.eos_token_id = demo_config["text_config"]["eos_token_id"]
    model.save_pretrained(folder)
    processor = CLIPImageProcessor(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_mean=[0.5] * 3,
        image_std=[0.4] * 3,
    )
    processor.save_pretrained(folder)
    return model


def expected_answers(model: LlavaForConditionalGeneration, folder: Path) -> list[str]:
    """Returns what transformers generates, greedily, for the bundled picture and each question."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pixels = CLIPImageProcessor.from_pretrained(folder)(Image.open(PICTURE).convert("RGB"), return_tensors="pt")
    answers = []
    for question in QUESTIONS:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        text = text.replace("<image>", "<image>" * model.config.image_seq_length)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            ids = model.generate(
                input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, pixel_values=pixels["pixel_values"],
                do_sample=False, max_new_tokens=NEW_TOKENS,
            )  # fmt: skip
        text = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        answers.append(text.rstrip("\N{REPLACEMENT CHARACTER}"))  # We never send half a character.
    return answers


def test_another_checkpoint_is_served_by_export_and_up(tmp_path: Path) -> None:
    checkpoint, repository = tmp_path / "tiny-llava", tmp_path / "repository"
    checkpoint.mkdir()
    model = write_checkpoint(checkpoint)
    command = [sys.executable, "-m", "triptych.cli", "export", str(checkpoint), "--repository", str(repository)]
    exported = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert exported.returncode == 0, exported.stderr
    environment = environment_of(StackSettings.from_environment().on_free_ports())
    up = start_up(
        {
            **environment,
            "TRIPTYCH_WORKER_MODEL_DIR": str(checkpoint),
            "TRIPTYCH_TRITON_MODEL_REPOSITORY": str(repository),
        }
    )
    try:
        assert up.ready.wait(START_TIMEOUT_S) and up.process.poll() is None, "\n".join(up.lines)
        with Client(up.router) as client:
            assert client.model().name == "tiny-llava"
            options = Options(max_tokens=NEW_TOKENS, timeout_s=60)
            answers = [client.ask(PICTURE, question, options=options) for question in QUESTIONS]
    finally:
        up.stop(signal.SIGTERM)
    assert {answer.usage.visual_tokens for answer in answers} == {(SIDE // PATCH) ** 2 + 1}
    assert [answer.text for answer in answers] == expected_answers(model, checkpoint)
