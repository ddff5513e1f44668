"""Logging: one line per event on stderr; never prompts, images or keys."""

import logging
import os
import sys


def setup_logging(service_name: str) -> None:
    """Configures the root logger. TRIPTYCH_LOG_LEVEL sets the level (default INFO)."""
    level = os.environ.get("TRIPTYCH_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(
        level=level if level in logging.getLevelNamesMapping() else "INFO",
        format=f"%(asctime)s %(levelname).1s {service_name} %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
