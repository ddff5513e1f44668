"""Which resolution an image is encoded at. Pure."""

from fractions import Fraction

from triptych.v1 import inference_pb2
from triptych.vision.encoder_spec import EncoderSpec

SHARES: dict[int, Fraction] = {
    inference_pb2.IMAGE_DETAIL_UNSPECIFIED: Fraction(1),
    inference_pb2.IMAGE_DETAIL_HIGH: Fraction(1),
    inference_pb2.IMAGE_DETAIL_MEDIUM: Fraction(2, 3),
    inference_pb2.IMAGE_DETAIL_LOW: Fraction(1, 2),
    inference_pb2.IMAGE_DETAIL_THUMBNAIL: Fraction(1, 3),
}
"""Shares of the encoder's native side, by inference_pb2.ImageDetail."""


def encoded_side(detail: int, spec: EncoderSpec) -> int:
    """Returns the side in pixels for an ImageDetail: its share of the native side in whole patches.

    The nearest number of patches, halves rounded up, at least one: 336, 224, 168 and 112 px for a ViT/14 at 336.
    """
    patches = (spec.image_side // spec.patch_size) * SHARES[detail]
    return max(1, int(patches + Fraction(1, 2))) * spec.patch_size
