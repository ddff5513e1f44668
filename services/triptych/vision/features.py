"""Projected features computed here, by torch, instead of by Triton: for calibration and measurements."""

from pathlib import Path

import torch
from PIL import Image

from triptych.vision.encoder_spec import EncoderSpec, parse_encoder_spec
from triptych.vision.export import router_parameter
from triptych.vision.export_checkpoint import read_checkpoint
from triptych.vision.export_graph import Projector, VisionEncoder
from triptych.vision.preprocess import preprocess


class LocalEncoder:
    """A checkpoint's vision part.

    Attributes:
        spec: Its preprocessing and shape.
    """

    def __init__(self, model_dir: Path) -> None:
        """Raises InvalidRequest when the folder is no LLaVA-format checkpoint."""
        checkpoint = read_checkpoint(model_dir)
        self.spec: EncoderSpec = parse_encoder_spec(router_parameter(checkpoint), "local")
        self._encoder, self._projector = VisionEncoder(checkpoint).eval(), Projector(checkpoint).eval()

    @torch.inference_mode()
    def features(self, picture: Image.Image, side: int | None = None) -> torch.Tensor:
        """Returns what the decoder is given for an RGB picture, [tokens, hidden], float32; native side by default."""
        pixels = torch.from_numpy(preprocess(picture, self.spec, side or self.spec.image_side))
        projected: torch.Tensor = self._projector(self._encoder(pixels[None]))[0]
        return projected
