"""A cluster whose programs may be of another revision."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos.cluster import Cluster
from tests.upgrade.previous import Previous, find_previous


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Previous:
    return find_previous(tmp_path_factory.mktemp("previous"))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Not booted yet."""
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        await cluster.close()
