"""What the router must know about the encoder, as `triptych export` wrote it into Triton's model configuration."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from triptych.errors import Unavailable

PARAMETER = "triptych"
"""Key in the `parameters` of the ensemble's config.pbtxt."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Preprocessing and shape of an encoder, ViT and projector together.

    Attributes:
        image_side: Native side of the square it sees, in pixels; a multiple of patch_size.
        patch_size: Side of a patch, in pixels.
        image_mean, image_std: Per channel (R, G, B), of values already multiplied by rescale_factor.
        rescale_factor: Turns 0..255 into the range that mean and std speak of.
        resample: Pillow's name of the filter, lower case: nearest, bilinear, bicubic, lanczos, box or hamming.
        hidden_size: Width of a feature row, which is the decoder's.
        select_strategy: `default` leaves the class token out of the features, `full` keeps it.
        fingerprint: Hash of weights and configuration.
        version: The version that Triton serves, e.g. "1".
        model: What Triton calls that version.
        max_images: Most images in one call.
    """

    image_side: int
    patch_size: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    rescale_factor: float
    resample: str
    hidden_size: int
    select_strategy: str
    fingerprint: str
    version: str
    model: str = "vision"
    max_images: int = 1

    def token_count(self, height: int, width: int | None = None) -> int:
        """Returns how many feature rows an image of height x width pixels has (a square without `width`).

        The encoder's output is checked by it.
        """
        patches = (height // self.patch_size) * ((height if width is None else width) // self.patch_size)
        return patches + (1 if self.select_strategy == "full" else 0)

    @property
    def preprocessing(self) -> str:
        """Everything that turns pixels into the encoder's input, but the side; canonical, for hashing."""
        return json.dumps([self.image_mean, self.image_std, self.rescale_factor, self.resample, self.patch_size])


def versioned_name(model: str, version: int | str) -> str:
    """Returns the name of the ensemble that is one version of a vision model."""
    return f"{model}_v{version}"


def newest(versions: Mapping[str, EncoderSpec]) -> EncoderSpec:
    """Returns the spec of the highest version; there must be one."""
    return versions[max(versions, key=lambda name: int(name) if name.isdigit() else -1)]


def parse_encoder_spec(parameter: str, version: str, model: str = "vision", max_images: int = 1) -> EncoderSpec:
    """Returns the spec in a model's `triptych` parameter (JSON).

    Raises Unavailable (ENCODER_MISCONFIGURED), naming what is wrong with the parameter.
    """
    try:
        fields = json.loads(parameter)
        spec = EncoderSpec(
            image_side=int(fields["image_side"]),
            patch_size=int(fields["patch_size"]),
            image_mean=_channels(fields["image_mean"]),
            image_std=_channels(fields["image_std"]),
            rescale_factor=float(fields["rescale_factor"]),
            resample=str(fields["resample"]).lower(),
            hidden_size=int(fields["hidden_size"]),
            select_strategy=str(fields["select_strategy"]),
            fingerprint=str(fields["fingerprint"]),
            version=version,
            model=model,
            max_images=max_images,
        )
    except KeyError as error:
        raise misconfigured(f"{error} is missing") from None
    except (TypeError, ValueError) as error:
        raise misconfigured(str(error)) from None
    if spec.patch_size < 1 or spec.image_side < spec.patch_size or spec.image_side % spec.patch_size:
        raise misconfigured(f"image_side {spec.image_side} is not a multiple of patch_size {spec.patch_size}")
    if spec.hidden_size < 1:
        raise misconfigured(f"hidden_size {spec.hidden_size} is not positive")
    if any(value <= 0 for value in spec.image_std):
        raise misconfigured("image_std holds a value that is not positive")
    if spec.select_strategy not in ("default", "full"):
        raise misconfigured("select_strategy is neither default nor full")
    if spec.resample not in ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"):
        raise misconfigured("resample is no filter of Pillow's")
    return spec


def misconfigured(why: str) -> Unavailable:
    """Returns the error for a model that was not exported for Triptych, or not by this version of it."""
    return Unavailable(
        f"the vision model's `{PARAMETER}` parameter cannot be used: {why}; write the repository with triptych export",
        reason="ENCODER_MISCONFIGURED",
    )


def unready(why: str) -> Unavailable:
    """Returns the error for an encoder that cannot be asked."""
    return Unavailable(f"the vision encoder does not answer: {why}", reason="ENCODER_UNAVAILABLE")


def _channels(values: list[float]) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue
