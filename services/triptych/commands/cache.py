"""`triptych cache`: what the worker's KV cache holds, and forgetting or pinning images."""

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from triptych.v1 import worker_pb2

TIMEOUT_S = 30.0
_SHORT = 16  # Hex digits of an identity that are shown.


def cache(
    worker: Annotated[str | None, typer.Option(help="the worker's host:port")] = None,
    images: Annotated[int, typer.Option(min=1, max=1000, help="how many images to list, hottest first")] = 10,
    drop: Annotated[str | None, typer.Option(metavar="HASH", help="forget an image; `all` forgets everything")] = None,
    pin: Annotated[str | None, typer.Option(metavar="HASH", help="keep an image's KV below the device")] = None,
    unpin: Annotated[str | None, typer.Option(metavar="HASH", help="let it be evicted again")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")] = False,
) -> None:
    """Shows the KV cache's tiers, hit rates and hottest images; HASH is the beginning of an image's identity."""
    from google.protobuf.json_format import MessageToDict
    from rich.console import Console

    from triptych.stack import StackSettings

    address = worker or StackSettings.from_environment().router.worker
    changes = {"drop": drop, "pin": pin, "unpin": unpin}
    done, report = asyncio.run(run(address, images, {name: value for name, value in changes.items() if value}))
    console = Console(stderr=as_json)
    for line in done:
        console.print(line, highlight=False)
    for table in tables_of(report):
        console.print(table)
    if as_json:
        fields = MessageToDict(report, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        for image, message in zip(fields["images"], report.images, strict=True):
            image["identity"] = message.identity.hex()
        print(json.dumps({"done": done, **fields}))


async def run(address: str, images: int, changes: dict[str, str]) -> tuple[list[str], "worker_pb2.CacheReport"]:
    """Makes changes, by `drop`, `pin` or `unpin`, and returns what was done and the report afterwards.

    Raises InvalidRequest for a hash that fits no image or several, and what the worker answers.
    """
    import grpc

    from triptych.rpc.channel import open_channel
    from triptych.rpc.status import from_rpc_error
    from triptych.v1 import worker_pb2, worker_pb2_grpc

    done: list[str] = []
    async with open_channel(address) as channel:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            if changes:
                known = await stub.InspectCache(worker_pb2.InspectCacheRequest(max_images=1000), timeout=TIMEOUT_S)
            for change, beginning in changes.items():
                if change == "drop":
                    request = (
                        worker_pb2.DropCachedRequest(everything=True)
                        if beginning == "all"
                        else worker_pb2.DropCachedRequest(identity=find_image(known, beginning))
                    )
                    answer = await stub.DropCached(request, timeout=TIMEOUT_S)
                    done.append(f"dropped {answer.blocks} blocks")
                else:
                    identity = find_image(known, beginning)
                    pinned = change == "pin"
                    await stub.PinImage(worker_pb2.PinImageRequest(identity=identity, pinned=pinned), timeout=TIMEOUT_S)
                    done.append(f"{change}ned {identity.hex()[:_SHORT]}")
            report = await stub.InspectCache(worker_pb2.InspectCacheRequest(max_images=images), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
    return done, report


def find_image(report: "worker_pb2.CacheReport", beginning: str) -> bytes:
    """Returns the identity that begins with these hex digits. Raises InvalidRequest unless there is exactly one."""
    from triptych.errors import InvalidRequest

    if len(beginning) == 64:
        try:
            return bytes.fromhex(beginning)
        except ValueError:
            raise InvalidRequest(f"{beginning!r} is no hash") from None
    found = [image.identity for image in report.images if image.identity.hex().startswith(beginning.lower())]
    if len(found) != 1:
        raise InvalidRequest(f"{len(found)} images the worker knows begin with {beginning!r}; give more of the hash")
    return found[0]


def tables_of(report: "worker_pb2.CacheReport") -> "list[Table]":
    """Returns a table of tiers and one of images."""
    from rich.table import Table

    tiers = Table("tier", "text", "visual", "budget", "blocks", "hits", "evicted", "failures")
    for tier in report.tiers:
        kinds = (tier.text, tier.visual)
        tiers.add_row(
            tier.name,
            _size(tier.text.size_bytes),
            _size(tier.visual.size_bytes),
            _size(tier.budget_bytes) if tier.budget_bytes else "",
            str(tier.blocks),
            str(sum(kind.hits for kind in kinds)),
            str(sum(kind.evictions for kind in kinds)),
            str(sum(kind.failures for kind in kinds) + tier.other_failures),
        )
    rates = {"text": report.text, "visual": report.visual}
    tiers.caption = ", ".join(
        f"{name}: {use.cached_tokens / use.asked_tokens:.1%} of {use.asked_tokens} prompt tokens cached"
        for name, use in rates.items()
        if use.asked_tokens
    )
    images = Table("image", "asked", "covered", "bytes", "")
    for image in report.images:
        held = ", ".join(f"{name} {_size(size)}" for name, size in sorted(image.tier_bytes.items()))
        identity = image.identity.hex()[:_SHORT]
        images.add_row(identity, str(image.asked), str(image.covered), held, "pinned" if image.pinned else "")
    return [tiers, images] if report.images else [tiers]


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
