"""How long Triton takes for a picture: the vision ensemble alone, one picture after another, nothing else running."""

import asyncio
import time
from typing import Annotated

import numpy as np
import onnxruntime
from pydantic import BaseModel, ConfigDict, Field
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

from triptych.bench.statistics import Spread, spread_of
from triptych.errors import Unavailable
from triptych.ports import reachable
from triptych.processes import LogSink
from triptych.rpc.channel import OPTIONS
from triptych.stack import Stack, StackSettings, plan_stack
from triptych.vision.encoder_spec import PARAMETER, parse_encoder_spec
from triptych.vision.export import ENCODER, ENSEMBLE

WARM_UPS = 2


class EncoderFigures(BaseModel):
    """What was measured."""

    model_config = ConfigDict(frozen=True)

    image_side: Annotated[int, Field(description="pixels per side, as the encoder sees it")]
    provider: Annotated[str, Field(description="what ONNX Runtime computed with")]
    onnxruntime: Annotated[str, Field(description="version")]
    seconds: Annotated[Spread, Field(description="a picture, there and back")]

    @property
    def images_per_s(self) -> float:
        """Of the median."""
        return 1 / self.seconds.median


async def measure_encoder(settings: StackSettings, pictures: int, sink: LogSink) -> EncoderFigures:
    """Starts Triton with the repository of `settings` on free ports and sends it `pictures` of its native size.

    Raises Unavailable when it does not get ready.
    """
    settings = settings.on_free_ports()
    stack = Stack([spec for spec in plan_stack(settings) if spec.name == "triton"], sink)
    client = InferenceServerClient(
        f"{reachable(settings.triton.host)}:{settings.triton.grpc_port}", channel_args=OPTIONS
    )
    try:
        try:
            await stack.start()
        except* Unavailable as group:
            raise group.exceptions[0] from None
        return await _time(client, pictures)
    finally:
        await client.close()
        await asyncio.shield(stack.stop())


async def _time(client: InferenceServerClient, pictures: int) -> EncoderFigures:
    ensemble = (await client.get_model_config(ENSEMBLE)).config
    side = parse_encoder_spec(ensemble.parameters[PARAMETER].string_value, "").image_side
    encoder = (await client.get_model_config(ENCODER)).config
    wanted = [one.name for one in encoder.optimization.execution_accelerators.cpu_execution_accelerator]
    offered = "".join(onnxruntime.get_available_providers()).lower()
    provider = next((name for name in wanted if name in offered), "cpu")
    dice = np.random.default_rng(0)
    seconds = []
    for _ in range(WARM_UPS + pictures):
        pixels = InferInput("pixel_values", [1, 3, side, side], "FP32")
        pixels.set_data_from_numpy(dice.standard_normal((1, 3, side, side), np.float32))
        begin = time.perf_counter()
        await client.infer(ENSEMBLE, [pixels])
        seconds.append(time.perf_counter() - begin)
    return EncoderFigures(
        image_side=side,
        provider=provider,
        onnxruntime=onnxruntime.__version__,
        seconds=spread_of(seconds[WARM_UPS:]),
    )
