"""A server in a process of its own that sends ready-made events as fast as sockets take them, to measure a client.

Run it as a module: it prints its port and serves until its standard input ends.
"""

import asyncio
import json
import sys

EVENTS = 512
"""Tokens of every answer."""

PER_WRITE = 4
"""Events in one write, so that writing costs this server less than reading costs the client."""

_TOKEN = b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
_LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % EVENTS
_MODELS = json.dumps({"data": [{"id": "flood", "owned_by": "tests"}]}).encode()


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers requests on one connection until the client leaves."""
    try:
        while request := await reader.readuntil(b"\r\n\r\n"):
            if request.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_MODELS), _MODELS))
                continue
            headers = dict(line.split(b": ", 1) for line in request.lower().split(b"\r\n")[1:] if b": " in line)
            await reader.readexactly(int(headers[b"content-length"]))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(EVENTS // PER_WRITE):
                writer.write(_chunk(_TOKEN) * PER_WRITE)
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(_chunk(_LAST) + _chunk(_USAGE) + b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main() -> None:
    """Serves on a free port."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
