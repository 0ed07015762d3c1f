"""Counts from the workers' ledgers the tokens that were generated, and those generated twice."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.ledger import AttemptRecord, read_ledger

#: Ids of training rollouts begin so, followed by the step's number; those of evaluation begin otherwise.
TRAINING_PREFIX: Final = "s"
#: More than a worker generates at once, and few enough to read many times a second.
_NEWEST: Final = 512


class LedgerAttempt(Struct, frozen=True):
    """One worker's attempt at a rollout: `generated` tokens after the first `start`."""

    worker: str
    start: int
    generated: int

    @property
    def end(self) -> int:
        return self.start + self.generated


class TokenAccounts(Struct, frozen=True, kw_only=True):
    generated: int  # tokens
    by_worker: dict[str, int]
    lost: dict[str, int]  # rollout -> tokens that the next attempt had to generate again
    interrupted: int  # rollouts that a killed worker left to others

    @property
    def twice(self) -> int:
        return sum(self.lost.values())


def read_attempts(ledgers: Mapping[str, Path], run_id: str) -> dict[str, list[LedgerAttempt]]:
    """rollout -> its attempts, worker by worker in the order of `ledgers`."""
    found: dict[str, list[LedgerAttempt]] = defaultdict(list)
    for worker, path in ledgers.items():
        for record in read_ledger(path) if path.exists() else []:
            if record.run_id == run_id:
                found[record.rollout_id].append(LedgerAttempt(worker, record.start, record.generated))
    return found


def settle(attempts: Mapping[str, Sequence[LedgerAttempt]], killed: Collection[str]) -> TokenAccounts:
    """Sums up attempts; others took over those of the `killed` workers.

    An attempt begins after the stored tokens of the one before it. So the attempts of a rollout, ordered by start, are
    a chain, and tokens past the next start were generated twice. Of equal starts, the killed worker's came first.
    """
    lost: dict[str, int] = {}
    by_worker: dict[str, int] = defaultdict(int)
    interrupted = 0
    for rollout, unordered in attempts.items():
        chain = sorted(unordered, key=lambda attempt: (attempt.start, attempt.worker not in killed))
        for attempt in chain:
            by_worker[attempt.worker] += attempt.generated
        for attempt, successor in pairwise(chain):
            interrupted += attempt.worker in killed
            if again := max(0, attempt.end - successor.start):
                lost[rollout] = lost.get(rollout, 0) + again
    return TokenAccounts(
        generated=sum(by_worker.values()), by_worker=dict(by_worker), lost=lost, interrupted=interrupted
    )


class InFlightTokens:
    """Counts from a worker's ledger the rollouts that it is in the middle of: those whose id begins with `prefix`."""

    def __init__(self, ledger: Path, prefix: str = TRAINING_PREFIX) -> None:
        self._ledger, self._prefix = ledger, prefix
        self._before: dict[str, int] = {}

    def look(self, tokens: range) -> int:
        """Counts rollouts that grew since the last look and have so many tokens, among the newest attempts."""
        if not self._ledger.exists():
            return 0
        records = read_ledger(self._ledger, newest=_NEWEST)
        grown = [record for record in records if self._grew(record) and record.start + record.generated in tokens]
        self._before = {record.attempt_id: record.generated for record in records}
        return sum(record.rollout_id.startswith(self._prefix) for record in grown)

    def _grew(self, record: AttemptRecord) -> bool:
        return record.generated > self._before.get(record.attempt_id, record.generated)
