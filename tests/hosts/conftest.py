"""Hosts to run the whole system on. They are namespaces of this machine, which only root may make."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.network import Network
from tests.hosts.run import ShortRun


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Hosts on which nothing runs yet. Whatever a test left running has ended when it is over."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"):
        pytest.skip("hosts are network namespaces: they need root, and the commands ip, tc and nsenter")
    with Network() as network:
        cluster = Cluster(tmp_path, network)
        try:
            yield cluster
        finally:
            cluster.close()


@pytest.fixture
def run(cluster: Cluster, tiny_model: Path) -> Iterator[ShortRun]:
    """Not submitted yet."""
    run = ShortRun(cluster, tiny_model)
    try:
        yield run
    finally:
        run.close()
