"""A cluster whose programs may be of another revision."""

import pytest

from tests.upgrade.previous import Previous, find_previous


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Previous:
    return find_previous(tmp_path_factory.mktemp("previous"))
