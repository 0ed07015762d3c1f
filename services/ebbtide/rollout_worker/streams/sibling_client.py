"""Takes what other workers made of this worker's groups from the answers of the append stream, for drafts.

Invariant: knows how far it has each sibling of the groups that the coordinator feeds, to say it when a stream opens;
the coordinator goes on behind that. A message that cannot be read is dropped: drafts are all that lacks it. Lost with
the process, and its groups with it.
"""

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Final, Protocol

import numpy as np

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker import metrics
from ebbtide.types.tokens import unpack_tokens
from ebbtide.v1 import fleet_pb2
from ebbtide.wire.sibling_columns import MOST_HELD, GroupName, SiblingDelta, SiblingReceiver, held_messages

log = telemetry.get_logger(__name__)
#: What the worker says at its attach if it wants them.
CAPABILITY: Final = "siblings"


class SiblingSink(Protocol):
    """What drafts are made of."""

    def add(self, group_id: str, version: int, rollout_id: str, offset: int, token_ids: Sequence[int]) -> None:
        """Take tokens that one version made, from token `offset` of the response on. Repeats are harmless."""
        ...

    def end(self, group_id: str) -> None:
        """Give back what is kept of a group."""
        ...


class SiblingClient:
    def __init__(self, sink: SiblingSink) -> None:
        self._sink = sink
        self._receiver = SiblingReceiver()
        self._ends: dict[GroupName, dict[str, int]] = {}

    def open(self) -> list[fleet_pb2.HeldSiblings]:
        """Begin a stream. Returns what is to be said in its first message."""
        self._receiver = SiblingReceiver()
        room = MOST_HELD
        for name, ends in self._ends.items():
            if room <= len(ends):  # what is not said comes again
                self._ends[name] = dict(islice(ends.items(), max(0, room - 1)))
            room -= len(self._ends[name]) + 1
        return held_messages({name: ends for name, ends in self._ends.items() if ends})

    def take(self, message: fleet_pb2.Siblings) -> None:
        """Hand on what came with an answer."""
        try:
            for name in self._receiver.ended(message):
                self._ends.pop(name, None)
                self._sink.end(name[1])
            deltas = self._receiver.deltas(message)
        except InvalidRequest as error:
            log.warning("siblings' tokens not understood", reason=str(error))
            return
        for delta in deltas:
            self._add(delta)

    def _add(self, delta: SiblingDelta) -> None:
        records = unpack_tokens(delta.tokens)
        cuts = [0, *(np.flatnonzero(np.diff(records["version"].astype(np.int64))) + 1).tolist(), len(records)]
        for begin, end in pairwise(cuts):
            some = records[begin:end]
            version = int(some["version"][0])
            self._sink.add(delta.group[1], version, delta.rollout_id, delta.offset + begin, some["id"].tolist())
        self._ends.setdefault(delta.group, {})[delta.rollout_id] = delta.offset + len(records)
        metrics.SIBLING_TOKENS.inc(len(records))
