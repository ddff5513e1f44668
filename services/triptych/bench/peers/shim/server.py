"""OpenAI's chat completions around an engine that has no server: streamed, greedy, exactly `max_tokens` long.

`python server.py --engine MODULE --name NAME --port PORT …` imports MODULE from this folder, calls its
`load(arguments)` and serves what that returns. Only the standard library is needed; a thread waits for each request.
"""

import argparse
import base64
import importlib
import json
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol


class Engine(Protocol):
    """What is served."""

    def stream(
        self, messages: list[dict[str, Any]], pictures: list[bytes], max_tokens: int
    ) -> tuple[int, Iterator[str]]:
        """Starts an answer: returns the prompt's length in tokens, and its pieces, one a token, as they are made.

        In `messages`, content is a string, or a list of parts in which `{"type": "image"}` stands for the next of
        `pictures` (encoded files). Called by many threads at once. An iterator that is closed early ends the answer.
        """


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Each token goes out at once.
    engine: Engine
    model: str

    def do_GET(self) -> None:
        """The list of models, at any path."""
        self._reply(200, {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "shim"}]})

    def do_POST(self) -> None:
        """A chat completion; other parameters than messages, max_tokens and stream are ignored."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            messages, pictures = read_messages(body["messages"])
            length, pieces = self.engine.stream(messages, pictures, int(body.get("max_tokens") or 128))
        except (KeyError, TypeError, ValueError) as error:
            self._reply(400, {"error": {"message": str(error), "type": "invalid_request_error"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = 0
        try:
            for text in pieces:
                count += 1
                self._send([{"index": 0, "delta": {"content": text}, "finish_reason": None}])
            usage = {"prompt_tokens": length, "completion_tokens": count, "total_tokens": length + count}
            self._send([{"index": 0, "delta": {}, "finish_reason": "length"}])
            self._send([], usage=usage)
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        finally:
            pieces.close()  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line a request would cost time."""

    def _reply(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send(self, choices: list[dict[str, Any]], **fields: Any) -> None:
        event = {"object": "chat.completion.chunk", "model": self.model, "created": int(time.time())}
        self._chunk(b"data: " + json.dumps({**event, "choices": choices, **fields}).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


class Server(ThreadingHTTPServer):
    """Many connections may come at one moment."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def read_messages(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Returns messages as Engine.stream wants them, and the pictures. Raises ValueError unless URLs are data: URLs."""
    read: list[dict[str, Any]] = []
    pictures: list[bytes] = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            parts: list[dict[str, str]] = []
            for part in content:
                if part["type"] == "image_url":
                    head, _, data = part["image_url"]["url"].partition(";base64,")
                    if not head.startswith("data:"):
                        raise ValueError("pictures must be data: URLs")
                    pictures.append(base64.b64decode(data))
                    parts.append({"type": "image"})
                else:
                    parts.append({"type": "text", "text": part["text"]})
            content = parts
        read.append({"role": message["role"], "content": content})
    return read, pictures


def serve(engine: Engine, model: str, port: int) -> Server:
    """Returns a server that listens on loopback (0: any free port); the caller runs it."""
    handler = type("BoundHandler", (Handler,), {"engine": engine, "model": model})
    return Server(("127.0.0.1", port), handler)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True, help="module of this folder")
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--name", required=True, help="the model's name in requests")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    serve(importlib.import_module(arguments.engine).load(arguments), arguments.name, arguments.port).serve_forever()


if __name__ == "__main__":
    main()
