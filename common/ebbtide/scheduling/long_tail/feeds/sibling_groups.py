"""Decides to which workers stored records of a run go on: to those that make other rollouts of the same group now.

Invariant: a group's readers are the feeds of workers that make one of its rollouts, or made one until their next
message. A rollout's records never go to the worker that makes it. At most `most_groups` groups are known, of at most
`MOST_MEMBERS` rollouts each; those that nobody makes go first. It is lost with the process; what is stored later is
passed on again as soon as its workers have sent the first of it.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Final, Protocol

from ebbtide.scheduling.long_tail.feeds.sibling_feed import MadeAttempt, Sibling, SiblingFeed, SiblingGroup
from ebbtide.types.append_delta import AppendColumns
from ebbtide.types.tokens import TOKEN_BYTES

#: Groups of a run that are known at once: those of several large steps.
MOST_GROUPS: Final = 4096
#: Rollouts of a group that are known: of several turns each, groups have many.
MOST_MEMBERS: Final = 256


class GroupedAttempt(MadeAttempt, Protocol):
    """`group_id`: empty for rollouts without siblings. `stored`: tokens of the rollout that the store has."""

    @property
    def group_id(self) -> str: ...
    @property
    def stored(self) -> int: ...


class SiblingGroups:
    """The groups of one run."""

    def __init__(self, run_id: str, *, most_groups: int = MOST_GROUPS, most_members: int = MOST_MEMBERS) -> None:
        self._run_id, self._most_groups, self._most_members = run_id, most_groups, most_members
        self._groups: dict[str, SiblingGroup] = {}  # those that began another rollout last at the end
        self._siblings: dict[str, Sibling] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def stored(
        self,
        deltas: AppendColumns,
        attempts: Sequence[GroupedAttempt | None],
        unsure: Container[int],
        feeds: Mapping[object, SiblingFeed],
    ) -> None:
        """Pass on what one call stored. `attempts`: of the deltas; `unsure`: places of those that were not stored as
        they were sent; `feeds`: by session, of all workers that want some.
        """
        siblings, tokens, at = self._siblings, deltas.tokens, 0
        columns = zip(deltas.rollouts, deltas.ends, deltas.counts, attempts, strict=True)
        for place, (rollout_id, end, count, attempt) in enumerate(columns):
            begin, at = at, at + count * TOKEN_BYTES
            if attempt is None:
                continue
            sibling = siblings.get(rollout_id)
            if sibling is None or sibling.attempt is not attempt:
                if not attempt.group_id:
                    continue
                sibling = self.begin(rollout_id, attempt, end - count, feeds)
            if unsure and place in unsure:
                sibling.end = attempt.stored
                continue
            sibling.end = end
            if count and sibling.fed:
                data = tokens[begin:at]
                for fed in sibling.fed:
                    fed.feed.push(fed, end - count, end, data)

    def begin(
        self, rollout_id: str, attempt: GroupedAttempt, stored: int, feeds: Mapping[object, SiblingFeed]
    ) -> Sibling:
        """Note that an attempt makes a rollout, of which `stored` tokens are in the store. A repeat does nothing."""
        sibling = self._siblings.get(rollout_id) or self._add(rollout_id, attempt.group_id, stored)
        session = attempt.session
        if sibling.attempt is attempt and sibling.maker is session:
            return sibling
        former = sibling.group.readers.get(sibling.maker)
        if former is not None and former.session is not session:
            former.made_until(sibling)
        sibling.attempt, sibling.maker = attempt, session
        if (feed := feeds.get(session)) is not None:
            feed.make(sibling)
        return sibling

    def forget(self, sibling: Sibling) -> None:
        """Give up a rollout that the store does not have any more."""
        self._siblings.pop(sibling.rollout_id, None)
        sibling.group.members.pop(sibling.rollout_id, None)
        for feed in sibling.group.readers.values():
            feed.drop(sibling)

    def close(self) -> None:
        """Give up all groups: the run is over."""
        for group in self._groups.values():
            for feed in list(group.readers.values()):
                feed.leave(group)
        self._groups.clear()
        self._siblings.clear()

    def _add(self, rollout_id: str, group_id: str, stored: int) -> Sibling:
        group = self._groups.pop(group_id, None)
        if group is None:
            group = SiblingGroup(self._run_id, group_id)
            self._drop_idle_group()
        self._groups[group_id] = group
        if len(group.members) >= self._most_members:
            idle = (one for one in group.members.values() if one.attempt is None or one.attempt.session is None)
            if (oldest := next(idle, None)) is not None:
                self.forget(oldest)
        sibling = group.members[rollout_id] = self._siblings[rollout_id] = Sibling(rollout_id, group, stored)
        for feed in group.readers.values():
            feed.follow(sibling)
        return sibling

    def _drop_idle_group(self) -> None:
        if len(self._groups) < self._most_groups:
            return
        idle = next((one for one in self._groups.values() if not one.readers), None)
        if idle is not None:
            del self._groups[idle.group_id]
            for rollout_id in idle.members:
                self._siblings.pop(rollout_id, None)
