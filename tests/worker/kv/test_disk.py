"""The disk tier: survives restarts; whatever happens to files or the file system is a miss, logged once."""

import errno
import logging
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.worker.kv.blocks import LAYOUT, chain_of, filled, found
from triptych.worker.kv.layout import BlockLayout
from triptych.worker.kv.tiers import disk as disk_module
from triptych.worker.kv.tiers.disk import DiskTier

ROOMY = 1000 * LAYOUT.block_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def disk(folder: Path, budget_bytes: int = ROOMY, layout: BlockLayout = LAYOUT) -> DiskTier:
    tier = DiskTier(folder, layout, budget_bytes)
    tier.check_integrity()
    return tier


def files(folder: Path) -> list[Path]:
    return sorted((folder / "triptych-kv").glob("*.kv"))


def failures(tier: DiskTier) -> int:
    return sum(count for (event, _), count in tier.usage().counts.items() if event == "failure")


def test_blocks_survive_a_restart_and_their_files_are_private(folder: Path) -> None:
    tier = disk(folder)
    first, second = chain_of(1, 6, visual=4), chain_of(2, 3)
    assert tier.put(filled(first)) == 6
    assert tier.put(filled(second)) == 3
    tier.close()
    again = disk(folder)
    assert found(again, first) == 6
    assert found(again, second) == 3
    assert again.usage().visual_bytes == 4 * LAYOUT.block_bytes
    assert [stat.S_IMODE(path.stat().st_mode) for path in files(folder)] == [0o600, 0o600]
    assert stat.S_IMODE((folder / "triptych-kv").stat().st_mode) == 0o700


def test_a_block_is_written_once(folder: Path) -> None:
    tier = disk(folder)
    chain = chain_of(1, 4)
    tier.put(filled(chain[:2]))
    assert tier.put(filled(chain)) == 4
    assert tier.put(filled(chain)) == 4
    assert tier.usage().blocks == 4
    assert len(files(folder)) == 2


def test_an_impostor_is_not_taken_for_a_block(folder: Path) -> None:
    tier = disk(folder)
    (block,) = chain_of(1, 1)
    tier.put(filled([block]))
    assert found(tier, [replace(block, content=b"")]) == 0
    assert found(tier, [block]) == 1


def test_a_folder_has_one_owner_at_a_time(folder: Path) -> None:
    tier = disk(folder)
    with pytest.raises(ValueError, match="another worker"):
        disk(folder)
    tier.close()
    disk(folder).close()


def test_the_budget_holds_and_the_oldest_run_goes_first_also_after_a_restart(folder: Path) -> None:
    budget = 10 * LAYOUT.block_bytes
    tier = disk(folder, budget)
    for name in range(3):
        assert tier.put(filled(chain_of(name, 3))) == 3
        for path in files(folder):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 10))
    assert found(tier, chain_of(0, 3)) == 3
    tier.close()
    again = disk(folder, budget)
    assert again.put(filled(chain_of(3, 3))) == 3
    assert [found(again, chain_of(name, 3)) for name in range(4)] == [3, 0, 3, 3]
    assert sum(path.stat().st_size for path in files(folder)) <= budget
    assert again.put(filled(chain_of(4, 20))) == 0


def test_a_smaller_budget_after_a_restart_is_kept(folder: Path) -> None:
    tier = disk(folder)
    for name in range(5):
        tier.put(filled(chain_of(name, 3)))
    tier.close()
    again = disk(folder, 7 * LAYOUT.block_bytes)
    assert again.usage().blocks == 6
    assert len(files(folder)) == 2


@pytest.mark.parametrize("keep", [0, 4, 30, 400, 0.5, 0.9, -1])
def test_a_truncated_file_is_a_miss_before_and_after_a_restart(
    folder: Path, keep: float, caplog: pytest.LogCaptureFixture
) -> None:
    chain = chain_of(1, 6)
    for restart in (False, True):
        tier = disk(folder)
        tier.put(filled(chain))
        (path,) = files(folder)
        size = path.stat().st_size
        os.truncate(path, int(size * keep) if 0 < keep < 1 else int(keep) % size)
        if restart:
            tier.close()
            tier = disk(folder)
        assert found(tier, chain) < 6
        assert failures(tier)
        assert found(tier, chain) == 0
        assert not files(folder)
        assert tier.put(filled(chain)) == 6
        assert found(tier, chain) == 6
        tier.close()
        shutil.rmtree(folder)


def test_a_flipped_bit_anywhere_is_a_miss_or_harmless_and_never_a_wrong_byte(folder: Path) -> None:
    dice = random.Random(0)
    chain = chain_of(1, 4)
    harmed = 0
    for _ in range(60):
        tier = disk(folder)
        tier.put(filled(chain))
        (path,) = files(folder)
        data = bytearray(path.read_bytes())
        place = dice.randrange(len(data)) if dice.random() < 0.5 else dice.randrange(1500)
        data[place] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        if dice.random() < 0.5:
            tier.close()
            tier = disk(folder)
        harmed += found(tier, chain) < 4
        tier.close()
        shutil.rmtree(folder)
    assert harmed > 20


def test_a_deleted_file_is_a_miss(folder: Path) -> None:
    tier = disk(folder)
    chain = chain_of(1, 3)
    tier.put(filled(chain))
    files(folder)[0].unlink()
    assert found(tier, chain) == 0
    assert not tier.contains(chain[0])
    assert tier.usage().blocks == 0
    assert failures(tier) == 3


def test_files_of_another_model_or_of_nobody_are_dropped(folder: Path) -> None:
    tier = disk(folder)
    tier.put(filled(chain_of(1, 3)))
    tier.close()
    (folder / "triptych-kv" / "half-written.tmp").write_bytes(b"x")
    (folder / "triptych-kv" / "noise.kv").write_bytes(os.urandom(5000))
    (folder / "notes.txt").write_text("not ours")
    other = disk(folder, layout=replace(LAYOUT, fingerprint="another model"))
    assert found(other, chain_of(1, 3)) == 0
    assert [path.name for path in (folder / "triptych-kv").iterdir()] == ["lock"]
    assert (folder / "notes.txt").exists()


def test_an_error_of_the_device_is_a_miss_and_logged_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = disk(folder)
    for name in range(3):
        tier.put(filled(chain_of(name, 2)))

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with caplog.at_level(logging.WARNING):
        assert [found(tier, chain_of(name, 2)) for name in range(3)] == [0, 0, 0]
    monkeypatch.undo()
    assert len(caplog.records) == 1
    assert failures(tier) == 6
    assert tier.put(filled(chain_of(0, 2))) == 2
    assert found(tier, chain_of(0, 2)) == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_costs_nothing_but_what_it_cannot_hold(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = disk(small_disk)
    with caplog.at_level(logging.WARNING):
        stored = [tier.put(filled(chain_of(name, 5))) for name in range(20)]
    assert stored[0] == 5
    assert stored[-1] == 0
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert not list((small_disk / "triptych-kv").glob("*.tmp"))
    assert found(tier, chain_of(0, 5)) == 5
    # Once there is room again, and some seconds have passed, it writes again.
    tier.drop(lambda identity: identity in chain_of(0, 5))
    assert tier.put(filled(chain_of(30, 5))) == 0
    monkeypatch.setattr(disk_module, "_WRITE_PAUSE_S", 0.0)
    tier._writable_at_s = 0.0
    assert tier.put(filled(chain_of(30, 5))) == 5
    assert found(tier, chain_of(30, 5)) == 5
    tier.close()


def test_a_file_that_may_not_be_read_is_a_miss(folder: Path) -> None:
    tier = disk(folder)
    chain = chain_of(1, 2)
    tier.put(filled(chain))
    path = files(folder)[0]
    if os.geteuid() == 0:  # Root may read everything; a folder in its place may not be.
        path.unlink()
        path.mkdir()
    else:
        path.chmod(0)
    assert found(tier, chain) == 0
    assert failures(tier)
    assert tier.put(filled(chain)) == 2
    assert found(tier, chain) == 2


def test_a_folder_that_may_not_be_written_costs_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = disk(folder)
    shutil.rmtree(folder / "triptych-kv")
    with caplog.at_level(logging.WARNING):
        assert tier.put(filled(chain_of(1, 2))) == 0
    assert len(caplog.records) == 1
    assert found(tier, chain_of(1, 2)) == 0


WRITER = """
import sys
from pathlib import Path
from tests.worker.kv.blocks import LAYOUT, chain_of, filled
from triptych.worker.kv.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), LAYOUT, 100_000 * LAYOUT.block_bytes)
print("ready", flush=True)
for name in range(100_000):
    tier.put(filled(chain_of(name, 4)))
    print(name, flush=True)
"""


@pytest.mark.slow
def test_killed_in_the_middle_of_writing_it_leaves_only_whole_blocks(folder: Path) -> None:
    dice = random.Random(1)
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(0.05 + 0.1 * dice.random())
        writer.send_signal(signal.SIGKILL)
        written = [int(line) for line in writer.stdout.read().split("\n")[:-1]]
        writer.wait()
        tier = disk(folder, 100_000 * LAYOUT.block_bytes)
        assert written
        assert all(found(tier, chain_of(name, 4)) == 4 for name in written)
        assert not list((folder / "triptych-kv").glob("*.tmp"))
        tier.close()
