"""Passes stored tokens on to the workers that make other rollouts of the same group: they draft from them.

The records ride in the answers to a worker's own messages, unopened. `scheduling/long_tail/feeds` decides who gets
which; what does not wait there is read from the store, page by page, as fast as its worker takes it.

Invariant: a worker gets only groups of which it makes a rollout at that moment, and of each sibling the records in
order, each once. `_runs` has no run that is over: its groups lead to its attempts, and these to all that it had. All of
it is lost with the process: a worker says how far it has its siblings when it opens its next stream. What finished
before a restart goes only to workers that had some of it.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from ebbtide.coordinator import metrics
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import InvalidRequest, NotFound, StoreUnavailable
from ebbtide.scheduling.long_tail.feeds.sibling_feed import FedSibling, SiblingFeed
from ebbtide.scheduling.long_tail.feeds.sibling_groups import SiblingGroups
from ebbtide.store.store import Store
from ebbtide.store.unexpected_data import UNEXPECTED
from ebbtide.types.append_delta import AppendAck, AppendColumns
from ebbtide.types.tokens import token_count
from ebbtide.v1 import fleet_pb2
from ebbtide.wire.sibling_columns import fill_siblings, held_siblings

#: What a worker that wants siblings' tokens says at its attach.
CAPABILITY: Final = "siblings"
#: Tokens read from the store at once, 96 KiB: other calls have their turn in between.
_PAGE_TOKENS: Final = 8192
_PASSED, _READ = (metrics.sibling_tokens.labels(kind) for kind in ("passed", "read"))


class FeedStream(NamedTuple):
    """A worker's feed, and the number of the stream that reads it."""

    feed: SiblingFeed
    number: int


class SiblingFeeds:
    """All feeds, by session."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: dict[RunState, SiblingGroups] = {}
        self._feeds: dict[object, SiblingFeed] = {}
        self._sessions: dict[SiblingFeed, WorkerSession] = {}
        self._reading: dict[SiblingFeed, asyncio.Task[None]] = {}

    @contextmanager
    def reading(self, session: WorkerSession, said: Sequence[fleet_pb2.HeldSiblings]) -> Iterator[FeedStream | None]:
        """The feed of a worker's stream, while that is open; None for a worker that does not want any. `said`: what the
        worker has. Raises `InvalidRequest`.
        """
        if CAPABILITY not in session.hello.capabilities:
            yield None
            return
        stream = self._open(session, said)
        try:
            yield stream
        finally:
            stream.feed.shut(stream.number)
            self._forget_gone()

    def _open(self, session: WorkerSession, said: Sequence[fleet_pb2.HeldSiblings]) -> FeedStream:
        held = held_siblings(said)
        self._forget_gone()
        if (feed := self._feeds.get(session)) is None:
            feed = self._feeds[session] = SiblingFeed(session)
            self._sessions[feed] = session
        number = feed.open({(name[0], one): end for name, ends in held.items() for one, end in ends.items()})
        for attempt in session.attempts.values():
            if attempt.group_id:
                self._begin(attempt)
        feed.keep_only(held)
        return FeedStream(feed, number)

    def placed(self, attempt: RunningAttempt) -> None:
        """Note that a worker was given an attempt: from now on it gets the tokens of its group."""
        if self._feeds and attempt.group_id:
            self._begin(attempt)

    def drop_run(self, run: RunState) -> None:
        """Note that a run is over: nothing of it goes to any worker."""
        if (groups := self._runs.pop(run, None)) is not None:
            groups.close()

    def _begin(self, attempt: RunningAttempt) -> None:
        if not attempt.run.ended:
            self._groups(attempt.run).begin(attempt.rollout.rollout_id, attempt, attempt.stored, self._feeds)

    def stored(
        self,
        run: RunState,
        deltas: AppendColumns,
        attempts: Sequence[RunningAttempt | None],
        others: Mapping[int, AppendAck],
    ) -> None:
        """Pass on the deltas of a call that the store has acknowledged. `others`: those, by place, that were not stored
        as they were sent.
        """
        if self._feeds and run.spec.tail.speculation != "off" and not run.ended:
            self._groups(run).stored(deltas, attempts, others, self._feeds)

    def tell(self, stream: FeedStream, answer: fleet_pb2.AppendResponse) -> None:
        """Add what waits for a worker to its next answer. More is read from the store if it is behind. An answer on a
        stream that was replaced while the store was asked gets nothing.
        """
        feed = stream.feed
        if not feed.serves(stream.number):
            return
        columns, ended = feed.take(), feed.take_ended()
        if feed not in self._reading and feed.next_late() is not None:
            self._reading[feed] = task = asyncio.create_task(self._read(feed), name="siblings")
            task.add_done_callback(lambda _: self._reading.pop(feed, None))
        if columns.numbers or ended:
            fill_siblings(answer.siblings, columns, ended)
            _PASSED.inc(sum(columns.counts))

    async def _read(self, feed: SiblingFeed) -> None:
        """Read what a worker lacks, as long as there is room for it."""
        while (fed := feed.next_late()) is not None:
            try:
                await self._read_page(feed, fed)
            except (StoreUnavailable, *UNEXPECTED):
                return  # tried again with the worker's next message

    async def _read_page(self, feed: SiblingFeed, fed: FedSibling) -> None:
        sibling, offset = fed.sibling, fed.end
        run_id = sibling.group.run_id
        try:
            chunk = await self._store.trajectories.tokens(run_id, sibling.rollout_id, offset, _PAGE_TOKENS)
        except NotFound:
            self._forget(feed, fed)
        except InvalidRequest:  # the store forgot some: what follows is passed on once it is beyond that
            feed.fill(fed, offset, b"")
        else:
            _READ.inc(token_count(chunk.tokens))
            feed.fill(fed, offset, chunk.tokens)

    def _forget(self, feed: SiblingFeed, fed: FedSibling) -> None:
        """Give up a rollout that was completed, and deleted."""
        for run, groups in self._runs.items():
            if run.run_id == fed.sibling.group.run_id:
                groups.forget(fed.sibling)
        feed.drop(fed.sibling)

    def _groups(self, run: RunState) -> SiblingGroups:
        if (found := self._runs.get(run)) is None:
            found = self._runs[run] = SiblingGroups(run.run_id)
        return found

    def _forget_gone(self) -> None:
        for feed, session in list(self._sessions.items()):
            if session.gone:
                feed.close()
                del self._sessions[feed], self._feeds[session]
