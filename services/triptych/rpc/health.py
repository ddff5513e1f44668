"""Asks a service whether it is serving, over grpc.health.v1 (ours and Triton's alike)."""

import contextlib

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.rpc.channel import open_channel

PROBE_TIMEOUT_S = 1.0


async def is_serving(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Tells whether grpc.health.v1 at `host:port` answers SERVING for the server as a whole."""
    async with open_channel(address) as channel:
        return await answers_serving(channel, timeout_s)


async def answers_serving(channel: grpc.aio.Channel, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Tells the same over an open channel."""
    stub = health_pb2_grpc.HealthStub(channel)
    with contextlib.suppress(grpc.aio.AioRpcError):
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
    return False
