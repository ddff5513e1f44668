"""What the routes share."""

import time
from dataclasses import dataclass, field

from triptych.config import GatewaySettings
from triptych.gateway.metrics import Metrics
from triptych.gateway.pictures import PictureFetcher
from triptych.gateway.router_client import RouterClient


@dataclass(frozen=True, slots=True)
class Services:
    """One gateway's parts.

    Attributes:
        settings: Its knobs.
        router: Who answers.
        pictures: Fetches what requests name by URL.
        metrics: What happened.
        started_s: When it started, seconds since the epoch.
    """

    settings: GatewaySettings
    router: RouterClient
    pictures: PictureFetcher
    metrics: Metrics
    started_s: int = field(default_factory=lambda: int(time.time()))

    async def close(self) -> None:
        """Closes all connections."""
        await self.pictures.close()
        await self.router.close()
