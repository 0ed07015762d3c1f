"""A worker gets of its groups exactly what others make: in order, each token once, and only while it makes some."""

import random
from collections.abc import Sequence

import pytest

from ebbtide.scheduling.long_tail.feeds.sibling_feed import SiblingFeed
from ebbtide.scheduling.long_tail.feeds.sibling_groups import SiblingGroups
from ebbtide.types.append_delta import AppendColumns
from ebbtide.types.tokens import TOKEN_BYTES, pack_tokens, unpack_tokens


class Attempt:
    """One worker's try at a rollout."""

    def __init__(self, group_id: str, session: str, stored: int) -> None:
        self.group_id, self.stored = group_id, stored
        self.session: object | None = session
        self.begun = False  # its first tokens were stored


def records(begin: int, end: int) -> bytes:
    """Tokens whose ids say where they belong."""
    return pack_tokens(range(begin, end), [-0.5] * (end - begin), 1)


class Fleet:
    """Workers, the rollouts that they make, and what each got."""

    def __init__(self, *workers: str, most_bytes: int = 1 << 20, **bounds: int) -> None:
        self.groups = SiblingGroups("run", **bounds)
        self.feeds: dict[object, SiblingFeed] = {}
        self.streams: dict[str, int] = {}
        self.got: dict[str, dict[str, list[int]]] = {name: {} for name in workers}
        self.begins: dict[str, dict[str, int]] = {name: {} for name in workers}
        self.own: dict[str, dict[str, int]] = {name: {} for name in workers}  # what each made itself
        self.numbers: dict[str, dict[int, str]] = {}
        self.attempts: dict[str, Attempt] = {}
        self.lengths: dict[str, int] = {}
        self.group_of: dict[str, str] = {}
        self.pages = 0
        for name in workers:
            self.feeds[name] = SiblingFeed(name, most_bytes=most_bytes)
            self.open(name)

    def open(self, worker: str) -> None:
        """A new stream: the worker says what it has."""
        for rollout, attempt in self.attempts.items():
            if attempt.session == worker and not attempt.begun:
                self.got[worker].pop(rollout, None)
                self.begins[worker].pop(rollout, None)
        held = {("run", name): self.begins[worker][name] + len(ids) for name, ids in self.got[worker].items()}
        self.streams[worker] = self.feeds[worker].open(held)
        for rollout, attempt in self.attempts.items():
            if attempt.session == worker:
                self.place(rollout)
        self.feeds[worker].keep_only({("run", self.group_of[name]) for name in self.got[worker]})
        self.numbers[worker] = {}

    def start(self, rollout: str, group: str, worker: str) -> None:
        if (former := self.attempts.get(rollout)) is not None:
            former.session = None
        self.group_of[rollout] = group
        self.attempts[rollout] = Attempt(group, worker, self.lengths.setdefault(rollout, 0))

    def place(self, rollout: str) -> None:
        """Tell that its worker was given it, with what is stored."""
        attempt = self.attempts[rollout]
        if isinstance(worker := attempt.session, str) and not attempt.begun:
            self.got[worker].pop(rollout, None)
            self.begins[worker].pop(rollout, None)
            self.own[worker][rollout] = self.lengths[rollout]
            attempt.begun = True
        self.groups.begin(rollout, attempt, attempt.stored, self.feeds)

    def add(self, *rollouts: str, count: int = 4, unsure: Sequence[str] = ()) -> None:
        """One call of the store, with so many tokens of each rollout."""
        ends, tokens = [], b""
        for rollout in rollouts:
            begin, attempt = self.lengths[rollout], self.attempts[rollout]
            if not attempt.begun and isinstance(attempt.session, str):  # from now on the worker has its own
                self.got[attempt.session].pop(rollout, None)
                self.begins[attempt.session].pop(rollout, None)
            attempt.begun = True
            self.lengths[rollout] = attempt.stored = begin + count
            if isinstance(attempt.session, str):
                self.own[attempt.session][rollout] = begin + count
            ends.append(begin + count)
            tokens += records(begin, begin + count)
        deltas = AppendColumns("run", rollouts, ["a"] * len(ends), ends, [count] * len(ends), tokens, {})
        places = {place for place, rollout in enumerate(rollouts) if rollout in unsure}
        self.groups.stored(deltas, [self.attempts[one] for one in rollouts], places, self.feeds)

    def end(self, rollout: str) -> None:
        self.attempts[rollout].session = None

    def take(self, worker: str, *, lost: bool = False) -> None:
        """An answer to the worker, which a breaking stream loses."""
        feed = self.feeds[worker]
        taken, ended = feed.take(), {group for _, group in feed.take_ended()}
        if lost:
            return
        for group in ended:
            for rollout in [one for one in self.got[worker] if self.group_of[one] == group]:
                del self.got[worker][rollout], self.begins[worker][rollout]
            self.own[worker] = {one: end for one, end in self.own[worker].items() if self.group_of[one] != group}
            numbers = self.numbers[worker]
            self.numbers[worker] = {n: one for n, one in numbers.items() if self.group_of[one] != group}
        opened = {fed.number: fed.sibling.rollout_id for fed in taken.opened}
        assert not opened.keys() & self.numbers[worker].keys(), "each number is opened once"
        self.numbers[worker] |= opened
        tokens, at = unpack_tokens(b"".join(taken.pieces))["id"].tolist(), 0
        for number, offset, count in zip(taken.numbers, taken.offsets, taken.counts, strict=True):
            self._get(worker, self.numbers[worker][number], offset, tokens[at : at + count])
            at += count
        assert at == len(tokens)

    def _get(self, worker: str, rollout: str, offset: int, tokens: list[int]) -> None:
        mine = self.making(worker)
        assert self.group_of[rollout] in {self.group_of[name] for name in mine}, "it makes one of the group now"
        assert rollout not in mine, "never what it makes itself"
        ids = self.got[worker].setdefault(rollout, [])
        begin = self.begins[worker].setdefault(rollout, offset)
        assert offset == begin + len(ids), "in order, each once"
        ids += tokens
        assert ids == list(range(begin, begin + len(ids)))

    def read(self, worker: str, *, page: int = 6) -> None:
        """Read what the worker lacks, page by page, as far as there is room."""
        feed = self.feeds[worker]
        while (fed := feed.next_late()) is not None:
            end = min(self.lengths[fed.sibling.rollout_id], fed.end + page)
            feed.fill(fed, fed.end, records(fed.end, end))
            self.pages += 1

    def settle(self, worker: str) -> None:
        for _ in range(200):
            self.read(worker)
            self.take(worker)

    def lacks(self, worker: str) -> dict[str, int]:
        """Tokens that the worker lacks of its groups' other rollouts, by rollout."""
        mine = self.making(worker)
        groups = {self.group_of[name] for name in mine}
        lacks = {}
        for name, length in self.lengths.items():
            has = self.begins[worker].get(name, 0) + len(self.got[worker].get(name, []))
            has = max(has, self.own[worker].get(name, 0))
            if self.group_of[name] in groups and name not in mine and has < length:
                lacks[name] = length - has
        return lacks

    def making(self, worker: str) -> set[str]:
        """The rollouts that the worker makes, and has sent some tokens of."""
        return {name for name, attempt in self.attempts.items() if attempt.session == worker and attempt.begun}


def test_each_of_two_workers_gets_what_the_other_stores_and_nothing_of_other_groups() -> None:
    fleet = Fleet("a", "b")
    for rollout, group, worker in (("x", "g", "a"), ("y", "g", "b"), ("z", "other", "b")):
        fleet.start(rollout, group, worker)
    for _ in range(3):
        fleet.add("x", "y", "z")
    for worker in "ab":
        fleet.read(worker)  # the first of x came before b made any
    fleet.take("a")
    fleet.take("b")
    assert fleet.got == {"a": {"y": list(range(12))}, "b": {"x": list(range(12))}}


def test_a_worker_that_begins_late_gets_what_is_finished_and_what_runs_from_the_start_by_pages() -> None:
    fleet = Fleet("a", "b")
    fleet.start("x", "g", "a")
    fleet.start("y", "g", "a")
    fleet.add("x", "y", count=20)
    fleet.end("x")
    fleet.start("z", "g", "b")
    fleet.add("z")
    fleet.add("y", count=3)
    fleet.read("b")
    fleet.take("b")
    assert fleet.got["b"] == {"x": list(range(20)), "y": list(range(23))}
    assert fleet.pages == 8, "of six tokens each"


def test_when_its_last_rollout_of_a_group_ends_nothing_that_waited_is_sent_and_the_group_is_ended_once() -> None:
    fleet = Fleet("a", "b")
    fleet.start("x", "g", "a")
    fleet.start("y", "g", "b")
    fleet.add("x", "y")
    fleet.take("a")
    fleet.add("y")
    fleet.end("x")
    feed = fleet.feeds["a"]
    assert feed.bytes > 0
    assert not feed.take().numbers
    assert feed.take_ended() == [("run", "g")]
    assert (feed.take().numbers, feed.take_ended(), feed.bytes) == ([], [], 0)
    fleet.add("y")
    assert feed.bytes == 0, "it is no reader any more"


def test_a_rollout_that_moves_on_goes_to_its_former_worker_from_where_that_stopped() -> None:
    fleet = Fleet("a", "b")
    fleet.start("x", "g", "a")
    fleet.start("y", "g", "a")
    fleet.add("x", "y", count=10)
    fleet.start("x", "g", "b")
    fleet.add("x", count=5)
    for worker in "ab":
        fleet.settle(worker)
    assert (fleet.begins["a"], fleet.got["a"]) == ({"x": 10}, {"x": [10, 11, 12, 13, 14]})
    assert fleet.got["b"] == {"y": list(range(10))}
    fleet.open("a")
    fleet.add("x", count=1)
    fleet.settle("a")
    assert fleet.got["a"] == {"x": [10, 11, 12, 13, 14, 15]}


def test_what_a_slow_worker_does_not_take_is_not_kept_and_read_when_it_takes_again() -> None:
    most = 40 * TOKEN_BYTES
    fleet = Fleet("a", "b", most_bytes=most)
    fleet.start("x", "g", "a")
    fleet.start("y", "g", "b")
    fleet.add("x", "y")
    for _ in range(100):
        fleet.add("y")
        assert fleet.feeds["a"].bytes <= most
    fleet.settle("a")
    assert fleet.got["a"] == {"y": list(range(404))}
    fleet.feeds["a"].shut(fleet.streams["a"])
    fleet.add("y")
    assert fleet.feeds["a"].bytes == 0, "without a stream nothing is kept"
    assert fleet.feeds["a"].next_late() is None


def test_a_stream_that_was_replaced_does_not_shut_its_successor() -> None:
    fleet = Fleet("a", "b")
    former = fleet.streams["a"]
    fleet.start("x", "g", "a")
    fleet.start("y", "g", "b")
    fleet.add("x", "y")
    fleet.open("a")
    fleet.feeds["a"].shut(former)
    fleet.settle("a")
    assert fleet.got["a"] == {"y": [0, 1, 2, 3]}


def test_tokens_that_the_store_was_sent_twice_go_on_once() -> None:
    fleet = Fleet("a", "b")
    fleet.start("x", "g", "a")
    fleet.start("y", "g", "b")
    fleet.add("x", "y")
    fleet.add("y", unsure=["y"])  # stored otherwise than sent: read from the store
    fleet.add("y")
    fleet.lengths["y"] -= 6
    fleet.add("y")  # it forgot six tokens, and gets them again
    fleet.add("y")
    fleet.settle("a")
    assert fleet.got["a"] == {"y": list(range(14))}


def test_groups_and_members_are_bounded_and_what_nobody_makes_goes_first() -> None:
    fleet = Fleet("a", "b", most_groups=2, most_members=3)
    fleet.start("x", "g", "a")
    fleet.add("x")
    for number in range(5):
        fleet.start(f"y{number}", "g", "b")
        fleet.add(f"y{number}")
        fleet.end(f"y{number}")
        fleet.start(f"z{number}", f"h{number}", "b")
        fleet.add(f"z{number}")
        fleet.end(f"z{number}")
        fleet.take("b")
    assert len(fleet.groups) == 2
    fleet.start("late", "g", "b")
    fleet.add("late")
    fleet.settle("b")
    assert set(fleet.got["b"]) == {"x", "y4"}, "of the group's last ones"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_moves_ends_breaks_or_is_late_no_token_is_missed_doubled_or_misplaced(seed: int) -> None:
    draw, workers = random.Random(seed), ["a", "b", "c"]
    fleet = Fleet(*workers, most_bytes=draw.choice([10, 60, 10_000]) * TOKEN_BYTES)
    rollouts = [(f"{group}{number}", group) for group in "ghi" for number in range(4)]
    for _ in range(1500):
        rollout, group = draw.choice(rollouts)
        attempt, worker = fleet.attempts.get(rollout), draw.choice(workers)
        action = draw.random()
        if action < 0.06:
            fleet.start(rollout, group, worker)
        elif action < 0.08 and attempt is not None:
            fleet.end(rollout)
        elif action < 0.10:
            if draw.random() < 0.5:
                fleet.take(worker, lost=True)
            fleet.feeds[worker].shut(fleet.streams[worker])
            fleet.open(worker)
        elif action < 0.25:
            fleet.read(worker)
        elif action < 0.5:
            fleet.take(worker)
        elif attempt is not None and attempt.session is not None:
            fleet.add(rollout, count=draw.randint(1, 9))
    for worker in workers:
        fleet.settle(worker)
        assert fleet.lacks(worker) == {}
