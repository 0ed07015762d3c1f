"""Bundles the parts that the coordinator's services share."""

from typing import NamedTuple

from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.publisher_keys import PublisherKeys
from ebbtide.coordinator.run_recovery import RunRecovery
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.attempt_transitions import AttemptTransitions
from ebbtide.coordinator.state.client_writes import ClientWrites
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.notifier import Notifier
from ebbtide.coordinator.token_readers import TokenReaders
from ebbtide.store.store import Store


class CoordinatorParts(NamedTuple):
    settings: CoordinatorSettings
    state: CoordinatorState
    store: Store
    notifier: Notifier
    fleet: WorkerRegistry
    attempts: AttemptTransitions
    recovery: RunRecovery
    publishers: PublisherKeys
    writes: ClientWrites
    readers: TokenReaders
