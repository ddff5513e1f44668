"""Channels and servers with one set of options: gRPC's own defaults refuse messages over 4 MiB."""

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from triptych.rpc.interceptor import ErrorInterceptor

MAX_MESSAGE_BYTES = 512 << 20

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A second server on a taken port is an error, not a silent share of its requests.
    ("grpc.so_reuseport", 0),
    # Reconnect quickly: services on one host restart in seconds, the default back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A proxy from the environment must never see prompts.
    ("grpc.enable_http_proxy", 0),
]


def open_channel(address: str) -> grpc.aio.Channel:
    """Returns an insecure asyncio channel to `host:port`."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)


def open_sync_channel(address: str) -> grpc.Channel:
    """Returns an insecure blocking channel to `host:port`."""
    return grpc.insecure_channel(address, options=OPTIONS)


def create_server(service_names: Sequence[str]) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """Returns a server with error mapping, reflection and health; every named service starts as NOT_SERVING.

    The caller adds its servicers and a port, starts the server, and reports health with `set_serving`.
    """
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=OPTIONS)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server, servicer


async def set_serving(servicer: health.aio.HealthServicer, service_names: Sequence[str], serving: bool) -> None:
    """Sets the health of the named services and of the server as a whole (the empty name)."""
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", *service_names):
        await servicer.set(name, status)


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Adds an insecure port (0: any free one) and returns it. Raises OSError naming the address when it is taken."""
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: the port is taken or the address is not ours") from error
    if bound == 0:
        raise OSError(f"cannot listen on {host}:{port}: the port is taken or the address is not ours")
    return bound
