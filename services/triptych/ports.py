"""Ports of services on this machine: which are free, and where clients reach what listens on them."""

import contextlib
import socket

from pydantic_settings import BaseSettings

from triptych.errors import Unavailable


def reachable(host: str) -> str:
    """Returns an address that clients on this machine can use for a server that listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


def port_is_free(host: str, port: int) -> bool:
    """Tells whether a server could listen on `host:port` now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns distinct ports that are free now. Another process may take one before it is used."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def check_ports(host: str, settings: BaseSettings, *knobs: str) -> None:
    """Raises Unavailable (PORT_TAKEN), naming port and variable, when `host` cannot listen on a port of `settings`.

    `knobs` are the fields of `settings` that hold ports.
    """
    for knob in knobs:
        port: int = getattr(settings, knob)
        if not port_is_free(host, port):
            name = f"{settings.model_config.get('env_prefix', '')}{knob}".upper()
            raise Unavailable(
                f"port {port} on {host} is taken (a stack that still runs?); free it or set {name}",
                reason="PORT_TAKEN",
            )
