"""An encoder whose cost follows its pixels: the bundled ViT over an image's tiles, as LLaVA-NeXT and InternVL cut them.

Each tile of the native side is encoded by itself, so time and memory grow in proportion to the image, at any size that
is whole tiles. (The bundled ViT over a whole 4K image would attend over 42,000 patches at once; no server does that.)
"""

import json
from pathlib import Path

import torch
from torch import nn

from triptych.vision.export import router_parameter
from triptych.vision.export_checkpoint import VisionCheckpoint, read_checkpoint
from triptych.vision.export_graph import Projector, VisionEncoder, check_onnx, write_onnx

MODEL = "vision"


class TiledEncoder(nn.Module):
    """[batch, 3, rows * side, columns * side] to [batch, tokens of all tiles, hidden], tile by tile, row by row."""

    def __init__(self, checkpoint: VisionCheckpoint) -> None:
        super().__init__()
        self.encoder = VisionEncoder(checkpoint)
        self.projector = Projector(checkpoint)
        self.side = checkpoint.preprocessing.image_side

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encodes the tiles of all images as one batch."""
        batch, _, height, width = pixel_values.shape
        rows, columns = height // self.side, width // self.side
        tiles = pixel_values.reshape(batch, 3, rows, self.side, columns, self.side).permute(0, 2, 4, 1, 3, 5)
        features = self.projector(self.encoder(tiles.reshape(-1, 3, self.side, self.side)))
        projected: torch.Tensor = features.reshape(batch, -1, features.shape[-1])
        return projected


def tile_side(checkpoint_folder: Path) -> int:
    """Returns the side of a tile in pixels."""
    return read_checkpoint(checkpoint_folder).preprocessing.image_side


def write_repository(checkpoint_folder: Path, repository: Path) -> None:
    """Writes a model repository with the tiled encoder, after comparing its graph with torch."""
    checkpoint = read_checkpoint(checkpoint_folder)
    module = TiledEncoder(checkpoint).eval()
    folder = repository / MODEL / "1"
    folder.mkdir(parents=True)
    rows, columns = torch.export.Dim("rows", min=1, max=64), torch.export.Dim("columns", min=1, max=64)
    write_onnx(
        module,
        folder / "model.onnx",
        {"pixel_values": torch.zeros(2, 3, 3 * module.side, 4 * module.side)},
        {"pixel_values": {0: torch.export.Dim("batch"), 2: module.side * rows, 3: module.side * columns}},
        "image_features",
    )
    check_onnx(folder / "model.onnx", module, torch.randn(1, 3, module.side, 2 * module.side))
    write_config(repository, router_parameter(checkpoint), checkpoint.hidden_size, max_images=1)


def write_config(repository: Path, parameter: str, hidden_size: int, max_images: int) -> None:
    """Writes the model's config.pbtxt with the most images that a call may have."""
    (repository / MODEL / "config.pbtxt").write_text(
        f"""\
name: "{MODEL}"
backend: "onnxruntime"
max_batch_size: {max_images}
input [ {{ name: "pixel_values" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }} ]
output [ {{ name: "image_features" data_type: TYPE_FP32 dims: [ -1, {hidden_size} ] }} ]
instance_group [ {{ count: 1 }} ]
parameters {{ key: "enable_mem_arena" value {{ string_value: "0" }} }}
parameters {{ key: "triptych" value {{ string_value: {json.dumps(parameter)} }} }}
""",
        encoding="utf-8",
    )


def set_max_images(checkpoint_folder: Path, repository: Path, max_images: int) -> None:
    """Changes the most images that a call may have."""
    checkpoint = read_checkpoint(checkpoint_folder)
    write_config(repository, router_parameter(checkpoint), checkpoint.hidden_size, max_images)
