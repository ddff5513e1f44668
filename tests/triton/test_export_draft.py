import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig, CLIPVisionModel, LlavaForConditionalGeneration

from tests.triton.checkpoints import HIDDEN
from tests.triton.conftest import silent
from tests.triton.test_export import parameter_of
from triptych.errors import InvalidRequest
from triptych.vision.encoder_spec import parse_encoder_spec
from triptych.vision.export_draft import export_draft
from triptych.vision.export_graph import relative_difference

pytestmark = pytest.mark.slow


def write_draft(folder: Path, **config: int) -> Path:
    torch.manual_seed(5)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 112,
        "patch_size": 14,
    }
    CLIPVisionModel(CLIPVisionConfig(**{**shape, **config})).save_pretrained(folder)
    return folder


def draft_features(repository: Path, pixels: torch.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    value = pixels.numpy()
    for model in ("vision_encoder_draft", "projector_draft"):
        session = onnxruntime.InferenceSession(
            str(repository / model / "1" / "model.onnx"), providers=["CPUExecutionProvider"]
        )
        (value,) = session.run(None, {session.get_inputs()[0].name: value})
    return np.asarray(value)


def test_a_draft_goes_through_the_targets_projector(checkpoint: Path, tmp_path: Path) -> None:
    draft, repository = write_draft(tmp_path / "draft"), tmp_path / "repository"
    export_draft(checkpoint, draft, repository, progress=silent)
    pixels = torch.randn(2, 3, 112, 112)
    tower = CLIPVisionModel.from_pretrained(draft).eval()
    projector = LlavaForConditionalGeneration.from_pretrained(checkpoint).model.multi_modal_projector
    with torch.no_grad():
        states = tower(pixels, output_hidden_states=True).hidden_states
        expected = projector(states[-1][:, 1:]).numpy()
    assert expected.shape == (2, 64, HIDDEN)
    assert relative_difference(draft_features(repository, pixels), expected) < 1e-4


def test_a_draft_takes_the_pixels_of_the_encoder_and_has_a_fingerprint_of_its_own(
    exported: Path, checkpoint: Path, tmp_path: Path
) -> None:
    export_draft(checkpoint, write_draft(tmp_path / "draft"), tmp_path / "repository", progress=silent)
    text = (tmp_path / "repository" / "vision_draft" / "config.pbtxt").read_text()
    lines = text.splitlines()
    parameter = json.loads(lines[lines.index('  key: "triptych"') + 2].strip().removeprefix("string_value: "))
    draft, target = parse_encoder_spec(parameter, "1"), parse_encoder_spec(parameter_of(exported), "1")
    assert draft.preprocessing == target.preprocessing
    assert (draft.hidden_size, draft.token_count(112)) == (target.hidden_size, target.token_count(112))
    assert draft.fingerprint != target.fingerprint
    assert 'model_name: "projector_draft"' in text


def test_a_draft_of_another_width_brings_its_own_projector(checkpoint: Path, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", hidden_size=16)
    with pytest.raises(InvalidRequest, match="needs multi_modal_projector weights of its own"):
        export_draft(checkpoint, draft, tmp_path / "repository", progress=silent)
    weights = load_file(draft / "model.safetensors")
    own = {
        "multi_modal_projector.linear_1.weight": torch.randn(24, 16),
        "multi_modal_projector.linear_1.bias": torch.randn(24),
        "multi_modal_projector.linear_2.weight": torch.randn(HIDDEN, 24),
        "multi_modal_projector.linear_2.bias": torch.randn(HIDDEN),
    }
    save_file(weights | own, draft / "model.safetensors", {"format": "pt"})
    export_draft(checkpoint, draft, tmp_path / "repository", progress=silent)
    assert draft_features(tmp_path / "repository", torch.randn(1, 3, 112, 112)).shape == (1, 64, HIDDEN)


@pytest.mark.parametrize("config", [{"patch_size": 28}, {"image_size": 224}])
def test_a_draft_with_other_tokens_is_refused(config: dict[str, int], checkpoint: Path, tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", **config)
    with pytest.raises(InvalidRequest, match="they must be equal"):
        export_draft(checkpoint, draft, tmp_path / "repository", progress=silent)


def test_something_else_than_a_tower_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="a draft is a clip_vision_model"):
        export_draft(checkpoint, checkpoint, tmp_path / "repository", progress=silent)
