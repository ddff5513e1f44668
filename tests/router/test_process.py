"""The router as a process of its own."""

import os
import signal
import subprocess
import sys
import time

from tests.router.fakes import png
from triptych.ports import free_ports
from triptych.rpc.channel import open_sync_channel
from triptych.v1 import inference_pb2, inference_pb2_grpc


def test_the_router_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, triptych.router.server\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnxruntime', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_sigterm_stops_the_router_cleanly_and_the_log_holds_no_payload() -> None:
    (port,) = free_ports(1)
    environment = os.environ | {
        "TRIPTYCH_ROUTER_PORT": str(port),
        "TRIPTYCH_ROUTER_TRITON": "127.0.0.1:1",
        "TRIPTYCH_ROUTER_WORKER": "127.0.0.1:1",
    }
    program = (
        "import asyncio; from triptych.config import RouterSettings; from triptych.router.server import serve;"
        "from triptych.telemetry.logs import setup_logging; setup_logging('router');"
        "asyncio.run(serve(RouterSettings()))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        with open_sync_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            part = inference_pb2.Part(image=inference_pb2.Image(data=png()[:-9]))
            text = inference_pb2.Part(text="xylophone")
            message = inference_pb2.Message(role=inference_pb2.ROLE_USER, parts=[part, text])
            request = inference_pb2.GenerateRequest(messages=[message])
            events = stub.Generate(request, wait_for_ready=True, timeout=30)
            assert events.code().name == "UNAVAILABLE"
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
        assert time.monotonic() - started < 9
    finally:
        process.kill()
    assert process.returncode == 0
    assert "listening" in log and "Traceback" not in log
    assert "xylophone" not in log and "IDAT" not in log
