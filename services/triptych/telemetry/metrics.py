"""Serving a process's Prometheus metrics on a port of their own; the gateway has them on its HTTP port instead."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server

log = logging.getLogger(__name__)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Buckets of histograms of times."""


@contextmanager
def served_metrics(registry: CollectorRegistry, host: str, port: int | None) -> Iterator[None]:
    """Answers GET /metrics at host:port from a thread of its own, for the length of the block; None: not at all.

    Raises OSError when the port is taken.
    """
    if port is None:
        yield
        return
    server, thread = start_http_server(port, host, registry)
    log.info("metrics on http://%s:%d/metrics", host, port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
