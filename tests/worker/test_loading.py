"""Checkpoints as they come: spellings, shards, and clear words about what is not supported."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.checkpoints import write_checkpoint
from tests.worker.driving import ask, load, run
from triptych.worker.loading import choose_device, choose_dtype, choose_threads
from triptych.worker.model.config import RopeConfig, UnsupportedCheckpoint, load_model_config
from triptych.worker.model.rotary import inverse_wavelengths
from triptych.worker.model.weights import fingerprint, load_decoder_weights

CPU = torch.device("cpu")


def rename_tensors(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


def edit_config(folder: Path, section: str | None = None, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config[section] if section else config).update(values)
    path.write_text(json.dumps(config))


def test_both_hub_spellings_give_the_same_answers(tiny_dir: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "language_model.model.embed_tokens.weight" in names
    rename_tensors(tmp_path, "language_model.model.", "model.language_model.")
    rename_tensors(tmp_path, "language_model.lm_head.", "lm_head.")
    one, other = load(tiny_dir), load(tmp_path)
    assert run(one.engine, [ask(one, "hello")])[0].tokens == run(other.engine, [ask(other, "hello")])[0].tokens


def test_sharded_weights_are_read_and_vision_weights_are_not_needed(tiny_dir: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    config = load_model_config(tmp_path).decoder
    sharded = load_decoder_weights(tmp_path, config, CPU, torch.float32)
    single = load_decoder_weights(tiny_dir, config, CPU, torch.float32)
    assert torch.equal(sharded.head, single.head)
    assert torch.equal(sharded.layers[1].qkv, single.layers[1].qkv)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    config = load_model_config(tmp_path).decoder
    rename_tensors(tmp_path, "layers.1.mlp.up_proj", "layers.1.mlp.gone")
    with pytest.raises(UnsupportedCheckpoint, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load_decoder_weights(tmp_path, config, CPU, torch.float32)
    edit_config(tmp_path, "text_config", intermediate_size=95)
    with pytest.raises(UnsupportedCheckpoint, match=r"config\.json makes it"):
        load_decoder_weights(tmp_path, load_model_config(tmp_path).decoder, CPU, torch.float32)


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("text_config", {"model_type": "gemma"}, "gemma"),
        ("text_config", {"hidden_act": "gelu"}, "hidden_act"),
        ("text_config", {"attention_bias": True}, "attention_bias"),
        ("text_config", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("text_config", {"model_type": "mistral", "sliding_window": 64}, "sliding_window"),
        (None, {"model_type": "qwen2_vl"}, "qwen2_vl"),
    ],
)
def test_what_is_not_supported_is_said_at_the_start(
    tmp_path: Path, section: str | None, values: dict[str, Any], words: str
) -> None:
    write_checkpoint(tmp_path)
    edit_config(tmp_path, section, **values)
    with pytest.raises(UnsupportedCheckpoint, match=words):
        load_model_config(tmp_path)


def test_a_folder_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_sparse_hub_configs_get_hugging_faces_defaults(tmp_path: Path) -> None:
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    config = {"model_type": "llava", "image_token_index": 32000, "text_config": text, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model_config(tmp_path)
    assert (model.decoder.hidden_size, model.decoder.layers, model.decoder.head_dim) == (4096, 32, 128)
    assert model.decoder.rope == RopeConfig(10000.0)
    assert model.decoder.dtype == torch.float16
    assert not model.decoder.tied_head
    assert model.image_token_id == 32000
    assert model.end_token_ids == {2}


@pytest.mark.parametrize(("named", "ids"), [(7, {7}), ([7, 9], {7, 9})])
def test_the_generation_config_names_the_end_tokens(tmp_path: Path, named: Any, ids: set[int]) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert load_model_config(tmp_path).end_token_ids == ids


def test_the_fingerprint_is_stable_and_changes_with_weights_and_configuration(tmp_path: Path) -> None:
    for name in ("one", "same"):
        write_checkpoint(tmp_path / name)
    write_checkpoint(tmp_path / "retrained", seed=1)
    one = fingerprint(tmp_path / "one")
    assert one == fingerprint(tmp_path / "same")
    assert one != fingerprint(tmp_path / "retrained")
    edit_config(tmp_path / "same", "text_config", rms_norm_eps=1e-5)
    assert one != fingerprint(tmp_path / "same")


def test_the_fingerprint_of_a_large_file_samples_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(100 << 20)  # Sparse: it takes no room.
    before = fingerprint(tmp_path)
    with weights.open("r+b") as file:
        file.seek((100 << 20) - 1)
        file.write(b"x")
    assert fingerprint(tmp_path) != before


def test_llama3_rope_stretches_only_long_wavelengths() -> None:
    rope = RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 64)
    plain, stretched = inverse_wavelengths(RopeConfig(10000.0), 32), inverse_wavelengths(rope, 32)
    assert stretched[0] == plain[0]
    assert stretched[-1] == plain[-1] / 8


def test_auto_is_float32_on_the_cpu_and_the_checkpoints_type_on_cuda() -> None:
    assert choose_dtype("auto", CPU, torch.float16) == torch.float32
    assert choose_dtype("auto", torch.device("cuda"), torch.float16) == torch.float16
    assert choose_dtype("bfloat16", CPU, torch.float16) == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_asking_for_cuda_where_there_is_none_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="device=cpu"):
        choose_device("cuda:0")


def test_a_small_decoder_gets_one_thread_and_a_large_one_all_cores(tiny_dir: Path) -> None:
    tiny = load_model_config(tiny_dir).decoder
    large = dataclasses.replace(tiny, layers=30, hidden_size=576, intermediate_size=1536, vocabulary=49152)
    assert choose_threads(tiny, cores=8) == 1
    assert choose_threads(large, cores=8) == 8
    assert choose_threads(large, cores=2) == 2
