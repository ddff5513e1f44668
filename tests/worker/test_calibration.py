"""Fitting principal components to what a model makes of pictures."""

from pathlib import Path

import pytest
import torch

from tests.worker.driving import load
from triptych.errors import InvalidRequest
from triptych.worker.calibration import fit_basis, visual_kv
from triptych.worker.engine.request import TokenizedPrompt
from triptych.worker.kv.low_rank import decode, encode
from triptych.worker.loading import LoadedModel
from triptych.worker.model.weights import load_decoder_weights
from triptych.worker.prompt import ImageSlot, Turn


def prompt_of(model: LoadedModel, tokens: int) -> TokenizedPrompt:
    return model.prompts.encode([Turn("user", ("look: ", ImageSlot(bytes(32), tokens), " "))])


def test_keys_are_those_before_the_rotation_wherever_the_picture_stands(tiny_dir: Path) -> None:
    model = load(tiny_dir)
    config = model.config.decoder
    features = torch.randn(40, config.hidden_size, generator=torch.Generator().manual_seed(0))
    keys, values = next(iter(visual_kv(model, prompt_of(model, 40), features)))
    layer = load_decoder_weights(tiny_dir, config, torch.device("cpu"), torch.float32).layers[0]
    normed = features * torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + config.norm_epsilon) * layer.attention_norm
    projected = (normed @ layer.qkv.T).view(40, -1, config.head_dim)
    assert torch.allclose(keys, projected[:, config.heads : config.heads + config.kv_heads], atol=1e-4)
    assert torch.allclose(values, projected[:, config.heads + config.kv_heads :], atol=1e-4)


def test_more_directions_lose_less_and_all_of_them_nothing(tiny_dir: Path) -> None:
    model = load(tiny_dir)
    dice = torch.Generator().manual_seed(0)
    pictures = [torch.randn(60, model.config.decoder.hidden_size, generator=dice) for _ in range(4)]
    basis = fit_basis(model, [(prompt_of(model, 60), one) for one in pictures[:3]])
    (keys, values), *_ = visual_kv(model, prompt_of(model, 60), pictures[3])
    errors = []
    for rank in (2, 4, 8, 16):
        part = basis.truncated(rank)
        vectors, mean = part.keys[0], part.key_means[0]
        errors.append(float((decode(encode(keys, vectors, mean), vectors, mean) - keys).norm() / keys.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 1 and errors[-1] < 1e-5
    assert values.shape == (60, model.config.decoder.kv_heads, model.config.decoder.head_dim)


def test_too_little_to_look_at_and_too_little_room_are_refused(tiny_dir: Path) -> None:
    model = load(tiny_dir, kv_blocks=8)
    with pytest.raises(InvalidRequest, match="show more pictures"):
        fit_basis(model, [(prompt_of(model, 4), torch.zeros(4, model.config.decoder.hidden_size))])
    with pytest.raises(InvalidRequest, match="kv_cache_bytes"):
        fit_basis(model, [(prompt_of(model, 200), torch.zeros(200, model.config.decoder.hidden_size))])
