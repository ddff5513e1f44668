"""ONNX Runtime as a Python-based Triton backend: serves `<model>/<version>/model.onnx` where there is no C++ backend.

Triton loads this file inside the Python backend's stub, alone: it may not import triptych. It reads the same
`config.pbtxt` as the C++ backend: `max_batch_size`, `instance_group`, `default_model_filename`, the execution
accelerators `openvino` (CPU), `tensorrt` and `cuda` (GPU), and the parameters `intra_op_thread_count`,
`inter_op_thread_count`, `execution_mode` and `enable_mem_arena`.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import triton_python_backend_utils as pb_utils

DEFAULT_MODEL_FILE = "model.onnx"
DEFAULT_MAX_BATCH_SIZE = 4  # What the C++ backend assumes for a model that batches and whose config names no limit.

# Accelerators as config.pbtxt names them, and what ONNX Runtime calls them.
CPU_ACCELERATORS = {"openvino": "OpenVINOExecutionProvider"}
GPU_ACCELERATORS = {"tensorrt": "TensorrtExecutionProvider", "cuda": "CUDAExecutionProvider"}

Feed = dict[str, npt.NDArray[Any]]
Item = tuple[int, Any, Feed]  # A request's place in the batch, the request, its inputs.

TRITON_TYPES = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(string)": "TYPE_STRING",
}


class TritonPythonModel:
    """One instance of one model: an ONNX Runtime session in a process of its own."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Fills in inputs, outputs and max_batch_size from the ONNX file where the config names none of them.

        A config that names inputs and outputs is left as it is, without opening the file (which may be large).
        """
        config = auto_complete_model_config.as_dict()
        if config.get("input") and config.get("output"):
            return auto_complete_model_config
        session = open_session(find_model_file(config, stub_model_folder()), config, optimize=False)
        batched = takes_batches(session)
        if batched and config.get("max_batch_size", 0) == 0 and not config.get("input") and not config.get("output"):
            auto_complete_model_config.set_max_batch_size(DEFAULT_MAX_BATCH_SIZE)
            auto_complete_model_config.set_dynamic_batching()
        limit = auto_complete_model_config.as_dict().get("max_batch_size", 0)
        for node in session.get_inputs() if not config.get("input") else ():
            auto_complete_model_config.add_input(describe(node, drop_batch=limit > 0))
        for node in session.get_outputs() if not config.get("output") else ():
            auto_complete_model_config.add_output(describe(node, drop_batch=limit > 0))
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the session; raises TritonModelException, which Triton reports as the reason the load failed."""
        check_tensor_path()
        self.config: dict[str, Any] = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        device = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
        path = find_model_file(self.config, folder)
        self.session = open_session(path, self.config, device=device)
        self.inputs = [node.name for node in self.session.get_inputs()]
        self.outputs = [node.name for node in self.session.get_outputs()]
        self.max_batch_size = int(self.config.get("max_batch_size", 0))
        check_names(path, "input", self.config.get("input", []), self.inputs)
        check_names(path, "output", self.config.get("output", []), self.outputs)
        if self.max_batch_size > 0 and not takes_batches(self.session):
            raise pb_utils.TritonModelException(
                f"{path} has a fixed first dimension: it cannot batch. Set max_batch_size to 0 in config.pbtxt"
            )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers a dynamic batch; requests of one shape share a run, and an error stays with its own request."""
        responses: list[Any] = [None] * len(requests)
        groups: dict[Any, list[Item]] = {}
        for index, request in enumerate(requests):
            try:
                feed = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}
                groups.setdefault(self._group_key(index, feed), []).append((index, request, feed))
            except Exception as error:
                responses[index] = failure(error)
        for items in groups.values():
            for (index, _, _), response in zip(items, self._answer(items), strict=True):
                responses[index] = response
        return responses

    def _group_key(self, index: int, feed: Feed) -> Any:
        """Requests with equal keys may be concatenated; without batching no two may."""
        if self.max_batch_size == 0:
            return index
        return tuple((value.dtype.str, value.shape[1:]) for value in feed.values())

    def _answer(self, items: list[Item]) -> list[Any]:
        """Returns one response per item, in order; never raises."""
        try:
            return self._run(items)
        except Exception as error:
            if len(items) == 1:
                return [failure(error)]
            # Somebody's values broke the run: each alone, so that only that one fails.
            return [response for item in items for response in self._answer([item])]

    def _run(self, items: list[Item]) -> list[Any]:
        asked = [set(request.requested_output_names()) for _, request, _ in items]
        wanted = [name for name in self.outputs if any(name in names for names in asked)]
        feeds = [feed for _, _, feed in items]
        # A lone request is read in place, from Triton's own memory.
        joined = feeds[0] if len(feeds) == 1 else {n: np.concatenate([feed[n] for feed in feeds]) for n in self.inputs}
        results = dict(zip(wanted, self.session.run(wanted, joined), strict=True))
        if len(feeds) == 1:
            return [respond(results)]
        responses = []
        start = 0
        for names, feed in zip(asked, feeds, strict=True):
            stop = start + feed[self.inputs[0]].shape[0]
            # Leading rows of an array are a view; Tensor makes the only copy, into shared memory.
            responses.append(respond({name: array[start:stop] for name, array in results.items() if name in names}))
            start = stop
        return responses


def respond(outputs: Feed) -> Any:
    """Returns a response with these outputs."""
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(name, value) for name, value in outputs.items()])


def failure(error: Exception) -> Any:
    """Returns a response that carries the error to the client."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{type(error).__name__}: {error}"))


def open_session(path: Path, config: dict[str, Any], *, device: int | None = None, optimize: bool = True) -> Any:
    """Returns a session for `path` on GPU `device`, or on the CPU where that is None or onnxruntime has no CUDA."""
    if not path.is_file():
        raise pb_utils.TritonModelException(f"{path} does not exist")
    options = ort.SessionOptions()
    options.intra_op_num_threads = parameter(config, "intra_op_thread_count") or default_threads(config)
    options.inter_op_num_threads = parameter(config, "inter_op_thread_count")
    if parameter(config, "execution_mode") == 1:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    # Idle threads that spin would take the cores that prefill and decode need on the same machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # ONNX Runtime keeps the memory of its largest run for the next, unless told otherwise.
    options.enable_cpu_mem_arena = parameter(config, "enable_mem_arena", 1) != 0
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(str(path), options, providers=choose_providers(path, config, device, options))
    except Exception as error:
        raise pb_utils.TritonModelException(f"ONNX Runtime cannot load {path}: {error}") from error
    if device is not None and "CUDAExecutionProvider" not in session.get_providers():
        pb_utils.Logger.log_warn(
            f"{path} runs on the CPU: instance_group asks for GPU {device}, onnxruntime {ort.__version__} offers "
            f"{', '.join(session.get_providers())}. Install onnxruntime-gpu to use it"
        )
    return session


def choose_providers(path: Path, config: dict[str, Any], device: int | None, options: Any) -> list[Any]:
    """Returns ONNX Runtime's providers in order of preference for GPU `device`, or for the CPU.

    An accelerator that the config names and this onnxruntime does not have is left out, with a line in the log.
    """
    known = CPU_ACCELERATORS if device is None else GPU_ACCELERATORS
    kind = "cpu_execution_accelerator" if device is None else "gpu_execution_accelerator"
    listed = config.get("optimization", {}).get("execution_accelerators", {}).get(kind, [])
    named = [entry["name"] for entry in listed]
    wanted = [known[name] for name in named if name in known]
    if device is not None and "CUDAExecutionProvider" not in wanted:
        wanted.append("CUDAExecutionProvider")
    offered = ort.get_available_providers()
    for name in named:
        if known.get(name) not in offered:
            pb_utils.Logger.log_warn(
                f"{path} runs without the accelerator {name!r}: onnxruntime {ort.__version__} offers "
                f"{', '.join(offered)}"
            )
    chosen = [(name, provider_options(name, device, options)) for name in wanted if name in offered]
    return [*chosen, "CPUExecutionProvider"]


def provider_options(provider: str, device: int | None, options: Any) -> dict[str, str]:
    """Returns how a provider is set up. OpenVINO computes in bfloat16 where the processor does so itself."""
    if provider != "OpenVINOExecutionProvider":
        return {"device_id": str(device)}
    precision = "bf16" if has_bfloat16(Path("/proc/cpuinfo")) else "f32"
    hints = {"CPU": {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": options.intra_op_num_threads}}
    return {"device_type": "CPU", "load_config": json.dumps(hints)}


def has_bfloat16(cpuinfo: Path) -> bool:
    """Tells whether an x86 processor multiplies bfloat16."""
    try:
        words = cpuinfo.read_text().split()
    except OSError:
        return False
    return "avx512_bf16" in words or "amx_bf16" in words


def parameter(config: dict[str, Any], name: str, default: int = 0) -> int:
    """Returns a whole-number parameter of the config, `default` when it is absent (0: ONNX Runtime's own choice)."""
    text = config.get("parameters", {}).get(name, {}).get("string_value", str(default))
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise pb_utils.TritonModelException(f"parameter {name} must be a whole number >= 0, not {text!r}")
    return value


def default_threads(config: dict[str, Any]) -> int:
    """Returns the cores this process may use, shared among the model's instances (at least 1)."""
    instances = sum(int(group.get("count", 1)) for group in config.get("instance_group", [])) or 1
    return max(1, len(os.sched_getaffinity(0)) // instances)


def find_model_file(config: dict[str, Any], folder: Path) -> Path:
    """Returns the path of the ONNX file that the config names, in a model version's folder."""
    return folder / (config.get("default_model_filename") or DEFAULT_MODEL_FILE)


def takes_batches(session: Any) -> bool:
    """Tells whether the first dimension of every input and output is dynamic."""
    shapes = [node.shape for node in (*session.get_inputs(), *session.get_outputs())]
    return all(shape and not isinstance(shape[0], int) for shape in shapes)


def describe(node: Any, *, drop_batch: bool) -> dict[str, Any]:
    """Returns an ONNX input or output as the config has it; dynamic dimensions are -1."""
    if node.type not in TRITON_TYPES:
        raise pb_utils.TritonModelException(f"{node.name} has type {node.type}, which Triton cannot carry")
    dims = [size if isinstance(size, int) else -1 for size in node.shape]
    return {"name": node.name, "data_type": TRITON_TYPES[node.type], "dims": dims[1:] if drop_batch else dims}


def check_names(path: Path, kind: str, configured: list[dict[str, Any]], actual: list[str]) -> None:
    """Raises unless the configured inputs (or outputs) exist in the file, and all the file's inputs are configured."""
    names = [entry["name"] for entry in configured]
    unknown = [name for name in names if name not in actual]
    missing = [name for name in actual if name not in names] if kind == "input" else []
    if unknown or missing:
        raise pb_utils.TritonModelException(
            f"config.pbtxt and {path} disagree: {kind}s {names} configured, {actual} in the file"
        )


def check_tensor_path() -> None:
    """Raises when tensors lose their contents: server 2.51 with numpy 2 makes empty ones without an error."""
    probe = pb_utils.Tensor("probe", np.ones(3, np.float32)).as_numpy()
    if probe.shape != (3,) or probe.sum() != 3:
        raise pb_utils.TritonModelException(f"this tritonserver needs numpy<2, but the stub has numpy {np.__version__}")


def stub_model_folder() -> Path:
    """Returns the model version's folder during auto-completion, when Triton passes no arguments.

    The stub's first argument is the model file's path; inside an embedded interpreter only /proc still has it.
    """
    return Path(Path("/proc/self/cmdline").read_bytes().split(b"\0")[1].decode()).parent
