"""A cluster whose programs may be of another revision."""

import pytest

from tests.upgrade.previous import Previous, find_before, find_previous


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Previous:
    return find_previous(tmp_path_factory.mktemp("previous"))


@pytest.fixture(scope="session")
def before_gateways(tmp_path_factory: pytest.TempPathFactory) -> Previous:
    """The last revision whose coordinator and workers knew no gateways."""
    return find_before("protos/ebbtide/v1/sessions.proto", tmp_path_factory.mktemp("before"))
