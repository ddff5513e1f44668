"""The gateway's web page: a chat with pictures, and a live view of the system. No build step, no external requests.

The API mounts it with one line (the router's lifespan, which FastAPI merges, closes its connections):

    app.include_router(page_router(SystemView(router="127.0.0.1:50051", worker=None, in_flight=lambda: 0), jaeger_url))

It serves `/` (the page), `/ui/<file>` (its parts), `/ui/config.json` and `/ui/state.json`. None of them is part of the
OpenAPI document.

What the page sends to `POST /v1/chat/completions`: `stream`, `stream_options.include_usage`, `temperature`,
`max_completion_tokens` where the person chose one, pictures as `data:` URLs, and `triptych.priority` and
`triptych.resolution` (high, medium, low, thumbnail). With a key in its settings it sends `Authorization: Bearer`.

What it reads from the stream: `choices[0].delta.content`, `choices[0].finish_reason`, `usage`, a mid-stream `error`,
and `triptych` of any chunk, merged as they come (each field is optional):

    request_id, trace_id
    images: [{width, height, encoded_side, detail, resolution_reason, visual_tokens,
              source: kv_cache | encoder_cache | encoder | draft}]
    timings: {intake, preprocess, encode, queue, prefill, decode, time_to_first_token, total}    seconds
    usage: {text_tokens, visual_tokens, cached_tokens, output_tokens}
    degradations: [{kind, explanation}]
    visual_kv: {policy, lossy, saved_bytes}
"""

import gzip
import hashlib
import mimetypes
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

import triptych
from triptych.gateway.page.view import SystemView

__all__ = ["SystemView", "page_router"]

_FILES = Path(__file__).with_name("static")
_SAMPLE = Path(triptych.__file__).with_name("demo") / "picture.png"

SECURITY_HEADERS: Mapping[str, str] = {
    # Pictures are shown from blob: URLs. Trusted types: nothing may turn a string into markup or script.
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' blob:",
            "connect-src 'self'",
            "form-action 'none'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class _PageFile:
    """A file as it is served."""

    body: bytes
    zipped: bytes
    media_type: str
    etag: str


def page_router(view: SystemView, jaeger_url: str | None = None) -> APIRouter:
    """Returns the routes of the page.

    `jaeger_url` is where a browser finds Jaeger's own page, e.g. http://localhost:16686; unset: no links to traces.
    """

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        yield
        await view.close()

    router = APIRouter(lifespan=lifespan, include_in_schema=False)
    files = {path.name: _read(path) for path in (*_FILES.iterdir(), _SAMPLE)}

    @router.get("/ui/config.json")
    async def config() -> JSONResponse:
        model = await view.model()
        values = {
            "version": triptych.__version__,
            "model": None if model is None else asdict(model),
            "jaeger_url": jaeger_url.rstrip("/") if jaeger_url else None,
        }
        return JSONResponse(values, headers={**SECURITY_HEADERS, "Cache-Control": "no-store"})

    @router.get("/ui/state.json")
    async def state() -> JSONResponse:
        values = asdict(await view.state())
        return JSONResponse(values, headers={**SECURITY_HEADERS, "Cache-Control": "no-store"})

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return _answer(request, files["index.html"])

    @router.api_route("/ui/{name}", methods=["GET", "HEAD"])
    async def part(request: Request, name: str) -> Response:
        file = files.get(name)
        return Response(status_code=404, headers=dict(SECURITY_HEADERS)) if file is None else _answer(request, file)

    return router


def _read(path: Path) -> _PageFile:
    body = path.read_bytes()
    media_type = "text/javascript" if path.suffix == ".js" else mimetypes.guess_type(path.name)[0]
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return _PageFile(body, gzip.compress(body, mtime=0), media_type or "application/octet-stream", etag)


def _answer(request: Request, file: _PageFile) -> Response:
    # Kept by the browser but asked for each time: a new release is seen at once, an old one costs a 304.
    headers = {**SECURITY_HEADERS, "Cache-Control": "no-cache", "ETag": f"W/{file.etag}", "Vary": "Accept-Encoding"}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.zipped, media_type=file.media_type, headers={**headers, "Content-Encoding": "gzip"})
    return Response(file.body, media_type=file.media_type, headers=headers)
