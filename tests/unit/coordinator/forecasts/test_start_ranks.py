"""Queued rollouts start by rank: a probe of each group, then those that may become longest; none waits for ever."""

from random import Random

from ebbtide.coordinator.forecasts.run_forecasts import RunForecasts
from ebbtide.coordinator.forecasts.start_ranks import StartRanks
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue
from ebbtide.step_pacing import VersionBounds
from tests.unit.coordinator.forecasts.drawn_lengths import drawn
from tests.unit.coordinator.forecasts.live_groups import begin, name_of, play, submit


class Queued:
    """Two groups of a run whose earlier steps have taught."""

    def __init__(self, *, alike: float = 0.9) -> None:
        self.forecasts = RunForecasts(64)
        for step in range(3):
            play(self.forecasts, 1_000 * step, drawn(Random(step), 64, alike=alike), step + 1.0)
        self.ranks = StartRanks(self.forecasts, oldest_s=100.0)
        self.groups = [submit(self.forecasts, place, 3) for place in (9_000, 9_010)]

    def order(self, *, begun: tuple[str, ...] = ()) -> list[str]:
        names = [(name, group) for group in self.groups for name in group.waiting]
        return [
            name
            for _, name in sorted(
                (self.ranks.rank(name, group, step=1, begun=name in begun, since=0.0), name) for name, group in names
            )
        ]


def test_one_sample_of_each_group_goes_first() -> None:
    assert {one.rpartition(".")[0] for one in Queued().order()[:2]} == {"s9000", "s9010"}


def test_siblings_of_a_long_response_go_before_those_of_a_short_one() -> None:
    queued = Queued()
    for place, tokens in ((9_000, 150), (9_010, 9_000)):
        begin(queued.forecasts, place, [0])
        queued.forecasts.finish(name_of(place, 0), place, tokens, whole=True)
    queued.forecasts.renew(50.0)
    assert [one.rpartition(".")[0] for one in queued.order()] == ["s9010", "s9010", "s9000", "s9000"]


def test_siblings_of_a_probe_that_still_runs_go_before_those_of_one_that_ended_at_a_usual_length() -> None:
    queued = Queued()
    begin(queued.forecasts, 9_000, [0])
    (runs,) = begin(queued.forecasts, 9_010, [0])
    queued.forecasts.finish(name_of(9_000, 0), 9_000, 700, whole=True)
    runs.made = 700
    queued.forecasts.renew(50.0)
    queued.forecasts.renew(51.0)
    assert queued.order()[0].startswith("s9010")


def test_what_has_begun_goes_on_first() -> None:
    assert Queued().order(begun=("s9010.2",))[0] == "s9010.2"


def test_where_groups_have_little_in_common_the_order_is_that_of_submission() -> None:
    queued = Queued(alike=0.1)
    begin(queued.forecasts, 9_000, [0])
    queued.forecasts.finish(name_of(9_000, 0), 9_000, 100, whole=True)
    queued.forecasts.renew(50.0)
    ranks = {
        queued.ranks.rank(one, group, step=1, begun=False, since=90.0)
        for group in queued.groups
        for one in group.waiting
    }
    assert len(ranks) == 1


def test_what_waited_too_long_goes_first() -> None:
    queued = Queued()
    queued.ranks.waits("old", 1, since=0.0)
    queued.ranks.waits("young", 1, since=90.0)
    assert queued.ranks.overdue(99.0) == {}
    ((name, rank),) = queued.ranks.overdue(101.0).items()
    assert name == "old"
    assert all(
        rank < queued.ranks.rank(one, group, step=1, begun=False, since=90.0)
        for group in queued.groups
        for one in group.waiting
    )


def test_what_waited_too_long_stays_first_when_its_groups_forecast_is_made_anew() -> None:
    queued = Queued()
    group, name = queued.groups[0], next(iter(queued.groups[0].waiting))
    before = queued.ranks.rank(name, group, step=1, begun=False, since=0.0)
    queued.ranks.waits(name, 1, since=0.0)
    rank = queued.ranks.overdue(101.0)[name]
    assert queued.ranks.rank(name, group, step=1, begun=False, since=0.0) == rank < before


def test_an_earlier_step_goes_before_a_later_one_whatever_its_lengths() -> None:
    queued = Queued()
    group = queued.groups[0]
    ranks = [
        queued.ranks.rank(name, group, step=step, begun=False, since=0.0) for step in (1, 2) for name in group.waiting
    ]
    assert max(ranks[:3]) < min(ranks[3:])


def test_a_queue_goes_by_rank_within_priorities_and_keeps_up_with_new_ranks() -> None:
    queue = RolloutQueue()
    for place, (name, priority) in enumerate((("a", 0), ("b", 0), ("c", 1), ("d", 0))):
        queue.add(
            QueuedRollout(
                rollout_id=name, episode_id=name, bounds=VersionBounds(0, 0), length=8, place=place, priority=priority
            ),
            (1, 2, -place),
        )
    assert [one.rollout_id for one in queue] == ["d", "b", "a", "c"]
    queue.rerank("a", (1, 0, 0))
    queue.rerank("unknown", (0, 0, 0))
    assert [one.rollout_id for one in queue] == ["a", "d", "b", "c"]
    assert queue.take("a") is not None
    queue.rerank_all({"b": (1, 2, 1), "d": (1, 2, 3), "c": (1, 2, 2), "unknown": (0, 0, 0)})
    assert [one.rollout_id for one in queue] == ["b", "d", "c"]
    queue.rerank_all({"d": (1, 2, 0)})
    assert [one.rollout_id for one in queue] == ["d", "b", "c"]


def test_many_members_have_other_ranks_at_once_in_whatever_order_they_are_named() -> None:
    queue, draw = RolloutQueue(), Random(1)
    ranks = {f"x{place}": (1, 2, draw.randrange(50)) for place in range(400)}
    places = {name: place for place, name in enumerate(ranks)}
    for name, place in places.items():
        queue.add(
            QueuedRollout(rollout_id=name, episode_id=name, bounds=VersionBounds(0, 0), length=8, place=place),
            ranks[name],
        )
    for _ in range(5):
        changed = {name: (1, draw.randrange(3), draw.randrange(50)) for name in draw.sample(sorted(ranks), 200)}
        queue.rerank_all(changed)
        ranks |= changed
        assert [one.rollout_id for one in queue] == sorted(ranks, key=lambda name: (ranks[name], places[name]))


def test_what_started_or_is_over_is_not_remembered_as_waiting() -> None:
    ranks = Queued().ranks
    for name in ("a", "b"):
        ranks.waits(name, 1, since=0.0)
    ranks.left("a")
    assert list(ranks.overdue(101.0)) == ["b"]
    assert ranks.overdue(102.0) == {}
    for number in range(100_000):
        ranks.waits(f"c{number}", 1, since=102.0)
        ranks.left(f"c{number}")
    assert len(ranks._oldest) < 2_000


def test_what_waited_longest_is_overdue_first_in_whatever_order_it_is_named() -> None:
    ranks = Queued().ranks
    for name, since in (("young", 90.0), ("old", 1.0), ("older", 0.0), ("queued again", 0.0)):
        ranks.waits(name, 1, since=since)
    ranks.waits("queued again", 1, since=95.0)
    assert list(ranks.overdue(102.0)) == ["older", "old"]
    assert list(ranks.overdue(192.0)) == ["young"]
    assert list(ranks.overdue(196.0)) == ["queued again"]


def test_what_becomes_overdue_together_is_named_little_by_little() -> None:
    ranks = Queued().ranks
    for number in range(2_000):
        ranks.waits(f"c{number}", 1, since=0.0)
    named = [len(ranks.overdue(101.0)) for _ in range(5)]
    assert sum(named) == 2_000
    assert max(named) <= 512
