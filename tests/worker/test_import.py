"""What is set before torch is loaded."""

import subprocess
import sys

import pytest

_TELLS = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            raise SystemExit

sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module",
    ["triptych.worker.server", "triptych.bench.engine.measure", "triptych.bench.visual_kv.measure"],
)
def test_openmp_threads_do_not_spin_wherever_the_engine_runs(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores that spin for torch's last operation made a step of 16 sequences half as long again."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    told = subprocess.run([sys.executable, "-c", _TELLS, module], capture_output=True, text=True, check=False)
    assert told.stdout == "PASSIVE\n", told.stderr
