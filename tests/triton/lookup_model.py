"""A small ONNX model that fails at run time for some inputs, with a config that leaves everything to be completed."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ROWS = 8


def write_lookup_model(repository: Path, name: str = "lookup") -> None:
    """Writes a model `index` [n, 1] int64 -> `row` [n, 1, 2]: row i is (i, 10 i); an index over 7 is an error."""
    table = np.stack([np.arange(ROWS), 10 * np.arange(ROWS)], axis=1).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "index"], ["row"])],
        "lookup",
        [helper.make_tensor_value_info("index", TensorProto.INT64, ["n", 1])],
        [helper.make_tensor_value_info("row", TensorProto.FLOAT, ["n", 1, 2])],
        [numpy_helper.from_array(table, "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (repository / name / "1").mkdir(parents=True)
    onnx.save(model, repository / name / "1" / "model.onnx")
    # A single instance and a long delay, so that concurrent requests do meet in one batch.
    (repository / name / "config.pbtxt").write_text(
        'backend: "onnxruntime"\ninstance_group [{ count: 1 }]\n'
        "dynamic_batching { max_queue_delay_microseconds: 100000 }\nmax_batch_size: 8\n"
    )


def write_bare_model(repository: Path, name: str) -> None:
    """Writes the same model with a config of one line."""
    write_lookup_model(repository, name)
    (repository / name / "config.pbtxt").write_text('backend: "onnxruntime"\n')
