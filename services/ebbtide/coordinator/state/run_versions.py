"""Models a run's policy versions, and which engines they fit.

Invariant: `available` has the versions that the store announced, without old ones that failed to install too often. The
weights' architecture is known once a worker has installed or refused them. Lost with the process: versions are read
back with the run, and the rest is learnt again from workers.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from ebbtide.coordinator.state.notifier import DispatchWakeups
from ebbtide.types.weights import PolicyVersion

#: So many failed installs make an old version unavailable.
_INSTALL_FAILURES: Final = 3


class RunVersions:
    def __init__(self, run_id: str, wakeups: DispatchWakeups) -> None:
        self.run_id, self._wakeups = run_id, wakeups
        self._available: dict[int, PolicyVersion] = {}
        self.available: Final[Mapping[int, PolicyVersion]] = self._available  # by number
        self.newest = 0  # of these; 0: none
        self._failed_installs: dict[int, int] = {}
        self.fitted = False  # some worker has installed a version
        self._misfits: Counter[str] = Counter()
        self.misfits: Final[Mapping[str, int]] = self._misfits  # refusals by architecture, until `fitted`
        self.architecture = ""  # of the weights, once known

    def reread(self, versions: Mapping[int, PolicyVersion]) -> None:
        """Take over what the store has, without those that were given up."""
        kept = {v: one for v, one in versions.items() if v in self._available or v not in self._failed_installs}
        self._available.clear()
        self._available.update(kept)
        self.newest = max(kept, default=0)

    def announce(self, version: PolicyVersion) -> None:
        self._available[version.version] = version
        self.newest = max(self.newest, version.version)
        self._wakeups.decide()

    def note_installed(self, version: int, architecture: str) -> None:
        """Note that a worker with an engine of this architecture installed a version."""
        self._failed_installs.pop(version, None)
        self.fitted, self.architecture = True, architecture
        self._misfits.clear()

    def note_architecture(self, architecture: str) -> None:
        """Note what a worker that refused the weights says of them."""
        self.architecture = architecture

    def note_misfit(self) -> None:
        """Count a refusal by a worker of another architecture; it counts while no worker has installed a version."""
        if not self.fitted:
            self._misfits[self.architecture] += 1

    def note_failed_install(self, version: int) -> None:
        """Count a failed install. An old version that fails often is no longer available."""
        failures = self._failed_installs[version] = self._failed_installs.get(version, 0) + 1
        if failures >= _INSTALL_FAILURES and version < self.newest:
            self._available.pop(version, None)

    def note_tokens_stored(self) -> None:
        """Note that the run has tokens: some worker has installed a version."""
        self.fitted = True
