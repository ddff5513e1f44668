from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from tests.worker.checkpoints import Reference, write_checkpoint
from tests.worker.driving import load
from tests.worker.serving import Client, settings_for
from triptych.worker.loading import LoadedModel
from triptych.worker.server import run_worker


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads cost more in hand-overs than such small matrices take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def tiny_reference(tiny_dir: Path) -> Reference:
    return Reference(tiny_dir)


@pytest.fixture
def tiny(tiny_dir: Path) -> LoadedModel:
    return load(tiny_dir)


@pytest.fixture
async def client(tiny_dir: Path) -> AsyncIterator[Client]:
    async with run_worker(settings_for(tiny_dir)) as worker:
        client = Client(worker)
        yield client
        await client.settle()
        await client.channel.close()
