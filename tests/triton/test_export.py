import json
import os
from pathlib import Path

import onnxruntime
import pytest
import torch

from tests.triton.checkpoints import HIDDEN, reference_features, respell_for_hub, write_checkpoint
from tests.triton.conftest import silent
from triptych.errors import InvalidRequest
from triptych.vision import export as export_module
from triptych.vision import export_graph
from triptych.vision.encoder_spec import PARAMETER, parse_encoder_spec
from triptych.vision.export import export
from triptych.vision.export_checkpoint import read_checkpoint
from triptych.vision.export_graph import Projector, VisionEncoder, relative_difference
from triptych.vision.export_repository import publish, stage_model

pytestmark = pytest.mark.slow

SIDES = (112, 84, 56)


def run_exported(repository: Path, pixels: torch.Tensor, version: int = 1) -> torch.Tensor:
    value = pixels.numpy()
    for model in ("vision_encoder", "projector"):
        path = repository / model / str(version) / "model.onnx"
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (value,) = session.run(None, {session.get_inputs()[0].name: value})
    return torch.from_numpy(value)


def check_against_transformers(repository: Path, checkpoint: Path, extra_tokens: int) -> None:
    for side in SIDES:
        for batch in (1, 3):
            pixels = torch.randn(batch, 3, side, side)
            actual = run_exported(repository, pixels)
            assert actual.shape == (batch, (side // 14) ** 2 + extra_tokens, HIDDEN)
            assert relative_difference(actual.numpy(), reference_features(checkpoint, pixels).numpy()) < 1e-4


def parameter_of(repository: Path) -> str:
    lines = (repository / "vision" / "config.pbtxt").read_text().splitlines()
    key = lines.index(f'  key: "{PARAMETER}"')
    value = lines[key + 2].strip().removeprefix("string_value: ")
    return str(json.loads(value))


def test_exported_graphs_equal_transformers_at_three_sides(exported: Path, checkpoint: Path) -> None:
    check_against_transformers(exported, checkpoint, extra_tokens=0)


def test_an_earlier_layer_with_class_token_equals_transformers(full_checkpoint: Path, tmp_path: Path) -> None:
    export(full_checkpoint, tmp_path / "repository", progress=silent)
    check_against_transformers(tmp_path / "repository", full_checkpoint, extra_tokens=1)
    spec = parse_encoder_spec(parameter_of(tmp_path / "repository"), "1")
    assert spec.token_count(112) == 65


def test_oblong_images_keep_rows_and_columns_apart(exported: Path, checkpoint: Path) -> None:
    pixels = torch.randn(2, 3, 56, 98)
    reference = reference_features(checkpoint, pixels)
    assert relative_difference(run_exported(exported, pixels).numpy(), reference.numpy()) < 1e-4


@pytest.mark.parametrize("strategy", ["default", "full"])
def test_several_feature_layers_are_concatenated_as_in_transformers(strategy: str, tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "model", vision_feature_layer=[-3, 1, -1], vision_feature_select_strategy=strategy
    )
    checkpoint = read_checkpoint(folder)
    assert checkpoint.feature_layers == (0, 1, 2)
    pixels = torch.randn(2, 3, 84, 84)
    with torch.no_grad():
        actual = Projector(checkpoint)(VisionEncoder(checkpoint)(pixels))
    assert relative_difference(actual.numpy(), reference_features(folder, pixels).numpy()) < 1e-4


def test_layers_that_are_not_needed_are_left_out(full_checkpoint: Path) -> None:
    assert len(VisionEncoder(read_checkpoint(full_checkpoint)).layers) == 1


def test_both_spellings_of_the_tower_are_the_same_model(checkpoint: Path, tmp_path: Path) -> None:
    hub = respell_for_hub(checkpoint, tmp_path / "hub")
    assert read_checkpoint(hub).fingerprint() == read_checkpoint(checkpoint).fingerprint()


def test_the_fingerprint_follows_weights_and_preprocessing(checkpoint: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", seed=1, vision_feature_layer=-1)
    before = read_checkpoint(other).fingerprint()
    assert before != read_checkpoint(checkpoint).fingerprint()
    (other / "preprocessor_config.json").write_text(json.dumps({"resample": 3}))
    assert read_checkpoint(other).fingerprint() != before


def test_the_ensemble_tells_the_router_how_to_preprocess(exported: Path, checkpoint: Path) -> None:
    spec = parse_encoder_spec(parameter_of(exported), "1")
    assert (spec.image_side, spec.patch_size, spec.hidden_size) == (112, 14, HIDDEN)
    assert (spec.image_mean, spec.image_std) == ((0.5, 0.4, 0.3), (0.3, 0.2, 0.1))
    assert (spec.resample, spec.rescale_factor, spec.select_strategy) == ("bilinear", 1 / 255, "default")
    assert spec.fingerprint == read_checkpoint(checkpoint).fingerprint()


def test_weights_too_large_for_one_file_lie_beside_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_graph, "INLINE_LIMIT_BYTES", 1)
    projector = Projector(read_checkpoint(checkpoint)).eval()
    export_graph.write_projector(projector, tmp_path / "model.onnx", 32)
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    export_graph.check_onnx(tmp_path / "model.onnx", projector, torch.randn(2, 7, 32))


def test_files_hold_no_paths_of_this_machine(exported: Path) -> None:
    assert b"site-packages" not in (exported / "vision_encoder" / "1" / "model.onnx").read_bytes()


def test_a_failed_export_leaves_the_repository_as_it_was(
    exported: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    before = snapshot(exported)
    monkeypatch.setattr(export_module, "write_encoder", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, exported, progress=silent)
    assert snapshot(exported) == before
    assert list(exported.parent.iterdir()) == [exported]


def test_publishing_is_undone_when_a_later_model_cannot_be_placed(tmp_path: Path) -> None:
    repository, area = tmp_path / "repository", tmp_path / "area"
    for name in ("first", "second"):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text("old")
    area.mkdir()
    stage_model(area, repository, "first", 1, "new")
    with pytest.raises(FileNotFoundError):
        publish(area, repository, ("first", "second", "never staged"))
    assert (repository / "first" / "config.pbtxt").read_text() == "old"


def test_other_versions_of_a_model_are_kept(tmp_path: Path) -> None:
    repository, area = tmp_path / "repository", tmp_path / "area"
    area.mkdir()
    (repository / "model" / "1").mkdir(parents=True)
    (repository / "model" / "1" / "model.onnx").write_text("one")
    (stage_model(area, repository, "model", 2, "new") / "model.onnx").write_text("two")
    publish(area, repository, ("model",))
    assert [(repository / "model" / v / "model.onnx").read_text() for v in ("1", "2")] == ["one", "two"]


def test_unusable_checkpoints_are_named(checkpoint: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    with pytest.raises(InvalidRequest, match=r"config\.json does not exist"):
        export(tmp_path / "nowhere", repository, progress=silent)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InvalidRequest, match="not a LLaVA-format checkpoint"):
        export(folder, repository, progress=silent)
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(InvalidRequest, match=r"model\.safetensors does not exist"):
        export(folder, repository, progress=silent)
    (folder / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(InvalidRequest, match="cannot read"):
        export(folder, repository, progress=silent)
    config = json.loads((checkpoint / "config.json").read_text())
    config["vision_config"]["hidden_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(InvalidRequest, match="do not fit its configuration"):
        export(folder, repository, progress=silent)


def test_a_repository_that_cannot_be_written_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidRequest, match="cannot write the model repository") as raised:
        export(checkpoint, tmp_path / "file" / "repository", progress=silent)
    assert raised.value.reason == "REPOSITORY_NOT_WRITABLE"


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (os.stat(path).st_ino, os.stat(path).st_mtime_ns)  # noqa: PTH116
        for path in folder.rglob("*")
    }
