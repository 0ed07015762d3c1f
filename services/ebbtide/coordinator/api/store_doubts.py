"""Tells callers to ask again while the store may have forgotten what they rely on."""

from collections.abc import Iterator
from contextlib import contextmanager

from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.errors import EbbtideError, StoreUnavailable


@contextmanager
def in_doubt(state: CoordinatorState, *refusals: type[EbbtideError]) -> Iterator[None]:
    """Turn a refusal into `StoreUnavailable` while the store may have forgotten what the caller saw stored: workers and
    leases send it again, and then the repeated call succeeds.
    """
    try:
        yield
    except refusals as error:
        if not state.doubtful:
            raise
        raise StoreUnavailable(f"the store came back and may have forgotten something ({error}); ask again") from None
