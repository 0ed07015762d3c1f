"""What the services of a coordinator share."""

from typing import NamedTuple

from ebbtide.coordinator.attempts import Attempts
from ebbtide.coordinator.bells import Bells
from ebbtide.coordinator.fleet import Fleet
from ebbtide.coordinator.publishers import Publishers
from ebbtide.coordinator.recovery import Recovery
from ebbtide.coordinator.settings import Settings
from ebbtide.coordinator.state import State
from ebbtide.store.store import Store


class Parts(NamedTuple):
    settings: Settings
    state: State
    store: Store
    bells: Bells
    fleet: Fleet
    attempts: Attempts
    recovery: Recovery
    publishers: Publishers
