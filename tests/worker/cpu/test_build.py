"""Building the C++ engine: once, and where it cannot be, a clear reason and torch instead."""

import logging
import os
from pathlib import Path

import pytest

from tests.worker.driving import ask, load, run
from triptych.worker.cpu import library as native
from triptych.worker.cpu.build import KernelsUnavailable, build, build_folder


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a compiler where nothing was built yet."""
    monkeypatch.setenv("TRIPTYCH_KERNELS_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)


def test_a_library_that_is_there_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    native.library()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build(build_folder()).is_file()


@pytest.mark.usefixtures("no_kernels")
def test_without_a_compiler_torch_computes_and_the_log_says_why(
    tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = load(tiny_dir)
    assert "no C++ compiler" in caplog.text
    assert run(model.engine, [ask(model, "what is it")])[0].tokens


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("wish", [{"kernels": "native"}, {"weights": "int8"}])
def test_asking_for_what_cannot_be_built_is_an_error(tiny_dir: Path, wish: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        load(tiny_dir, **wish)


def test_int8_without_the_engine_names_the_knobs(tiny_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"weights=int8.*kernels"):
        load(tiny_dir, weights="int8", kernels="torch")


def test_a_compiler_that_fails_shows_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho cannot do this >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(KernelsUnavailable, match="cannot do this"):
        build(tmp_path / "kernels")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(KernelsUnavailable, match="cannot be written"):
        build(tmp_path / "kernels")
