"""What becomes of the visual KV of a running sequence once its prompt is computed."""

from enum import StrEnum

from triptych.v1 import generation_pb2


class VisualKvPolicy(StrEnum):
    """Where visual KV lives while its sequence decodes, and in which form. The values are the names users see."""

    EXACT = "exact"
    """On the device, as computed."""
    OFFLOAD = "offload_visual"
    """In host memory, as computed; attention over it is computed there and joined with the device's part."""
    LOW_RANK = "compress_visual_low_rank"
    """On the device, as principal components of keys and values; lossy."""
    MERGE = "compress_visual_merge"
    """On the device, with similar tokens of an image merged; lossy."""

    @property
    def proto(self) -> generation_pb2.VisualKvPolicy.ValueType:
        """Its name in the protos."""
        return generation_pb2.VisualKvPolicy.Value(f"VISUAL_KV_POLICY_{self.value.upper()}")

    @property
    def lossy(self) -> bool:
        """Whether it may change an answer."""
        return self in (VisualKvPolicy.LOW_RANK, VisualKvPolicy.MERGE)


def policy_name(value: int) -> str:
    """Returns a generation_pb2.VisualKvPolicy as users see it; `exact` when it is unset."""
    name = generation_pb2.VisualKvPolicy.Name(generation_pb2.VisualKvPolicy.ValueType(value))
    short = name.removeprefix("VISUAL_KV_POLICY_").lower()
    return VisualKvPolicy.EXACT.value if short == "unspecified" else short
