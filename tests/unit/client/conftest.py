"""A relay that publishers of one process use instead of a service."""

import pytest

from ebbtide.client import publishing
from tests.unit.client.ranks import MemoryRelay


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> MemoryRelay:
    made = MemoryRelay()
    monkeypatch.setattr(publishing, "Staging", lambda _peer, _run_id: made)
    return made
