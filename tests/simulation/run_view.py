"""One run as the store has it: its keys, its rollouts, and its versions."""

import math
from typing import Any

from ebbtide.store.records import unpack
from ebbtide.store.scripts import run_key, run_prefix
from ebbtide.types.tokens import TOKEN_BYTES
from ebbtide.types.weights import PolicyVersion
from tests.simulation.plan import Wanted, batch_of, key_of, weights_mark
from tests.simulation.trainer import Journal


class Seen:
    """A rollout as it was after the last command. `name`: by `key_of`."""

    def __init__(self, run: "RunView", wanted: Wanted) -> None:
        self.run, self.wanted = run, wanted
        self.rollout_id = wanted.request.rollout_id
        self.name = key_of(run.run_id, self.rollout_id)
        self.row = run_key(run.run_id, "ROLLOUT", self.rollout_id).encode()
        self.tokens = run_key(run.run_id, "TOKENS", self.rollout_id).encode()
        self.field = b"r:" + self.rollout_id.encode()
        self.state = self.attempt = ""
        self.stored = 0
        self.attempts = 0

    def read(self, data: dict[bytes, Any]) -> tuple[str, str, bytes]:
        """State, attempt and tokens, as the store has them."""
        row, tokens = data.get(self.row), data.get(self.tokens)
        values = row.value._values if row is not None else {}
        state, attempt = values.get(b"state", b"").decode(), values.get(b"attempt", b"").decode()
        return state, attempt, tokens.value if tokens is not None else b""

    def take(self, state: str, attempt: str, tokens: bytes) -> None:
        self.state, self.attempt, self.stored = state, attempt, len(tokens) // TOKEN_BYTES


class RunView:
    """`over_at`: when the run's fence was deleted; inf before."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self.run_id = journal, journal.plan.run_id
        self.prefix = run_prefix(self.run_id).encode()
        self.rollouts = {name: Seen(self, wanted) for name, wanted in journal.plan.wanted.items()}
        self.fence = run_key(self.run_id, "FENCE").encode()
        self._versions = run_key(self.run_id, "VERSIONS").encode()
        self._done, self._run = run_key(self.run_id, "DONE").encode(), run_key(self.run_id, "RUN").encode()
        self.fenced = False
        self.over_at = math.inf
        self.known: dict[int, PolicyVersion] = {}

    def fences(self, data: dict[bytes, Any]) -> dict[bytes, bytes] | None:
        item = data.get(self.fence)
        return None if item is None else item.value._values

    def versions(self, data: dict[bytes, Any]) -> set[int]:
        """Those that the store has."""
        announced = data.get(self._versions)
        return {int(key) for key in announced.value._values} if announced is not None else set()

    def learn_versions(self, data: dict[bytes, Any]) -> None:
        """Remember what was announced."""
        announced = data.get(self._versions)
        for key, record in (announced.value._values if announced is not None else {}).items():
            if int(key) not in self.known:
                self.known[int(key)] = unpack(record, PolicyVersion)

    def mark(self, version: int, data: dict[bytes, Any]) -> float | None:
        """The mark of the version's weights; None while nobody announced it."""
        if version not in self.known:
            self.learn_versions(data)
        found = self.known.get(version)
        return None if found is None else weights_mark(self.journal.plan.number, found.step)

    def over(self, rollout_id: str, data: dict[bytes, Any]) -> bool:
        """Whether the store says, or need not say any more, that this rollout is over."""
        done, run = data.get(self._done), data.get(self._run)
        first_step = int(run.value._values.get(b"first_step", 0)) if run is not None else 0
        marked = done is not None and b"r:" + rollout_id.encode() in done.value
        return self.fence not in data or marked or batch_of(rollout_id) < first_step
