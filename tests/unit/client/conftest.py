"""A relay that publishers of one process use instead of a service."""

import pytest

from ebbtide.client.publisher import publisher
from tests.unit.client.ranks import MemoryRelay


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> MemoryRelay:
    made = MemoryRelay()
    monkeypatch.setattr(publisher, "VersionStaging", lambda _peer, _run_id: made)
    return made
