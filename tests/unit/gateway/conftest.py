"""Template processes, which all tests of this folder share."""

from collections.abc import Iterator

import pytest

from ebbtide.gateway.templates import TemplateSandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[TemplateSandbox]:
    made = TemplateSandbox(processes=1)
    yield made
    made.close()
