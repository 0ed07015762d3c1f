"""Rollouts whose prompts are scored go to workers that score, wherever prefixes are cached, and block no others."""

import msgspec

from ebbtide.coordinator.rules.placement import Placement, place
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout, RolloutQueue, unscored
from ebbtide.coordinator.rules.worker_view import WorkerView, may_take
from tests.unit.coordinator.test_placement import cached, waiting, worker


def scored(number: int, *, episode: str = "", since: float = 0.0) -> QueuedRollout:
    return msgspec.structs.replace(waiting(number, episode=episode), score_records=10, since=since)


def scorer(name: str, slots: int = 4, running: int = 0, **more: int) -> WorkerView:
    return msgspec.structs.replace(worker(name, slots, running, **more), scores=True)


def test_only_a_worker_that_scores_gets_a_prompt_to_score() -> None:
    workers = [worker("a", slots=8), scorer("b", slots=2)]
    found = place([scored(1), waiting(2), scored(3), scored(4), waiting(5)], workers, {})
    assert dict(found)["r1"] == dict(found)["r3"] == "b"
    assert "r4" not in dict(found), "its worker is full"
    assert {"r2", "r5"} <= set(dict(found))


def test_nothing_is_scored_where_nobody_can_and_others_go_on() -> None:
    workers = [worker("a", slots=8)]
    assert place([scored(1), scored(2), waiting(3)], workers, {}) == [Placement("r3", "a")]
    assert not may_take(scored(1), workers[0])
    assert may_take(scored(1), scorer("b"))


def test_only_a_worker_that_samples_with_min_p_gets_a_rollout_with_it() -> None:
    able = msgspec.structs.replace(worker("b", 2), min_p=True)
    cut = [msgspec.structs.replace(waiting(number), min_p=True) for number in (1, 3)]
    found = dict(place([cut[0], waiting(2), cut[1]], [worker("a", slots=8), able], {}))
    assert (found["r1"], found["r3"]) == ("b", "b")
    assert place([*cut, waiting(4)], [worker("a", slots=8)], {}) == [Placement("r4", "a")]
    assert not may_take(cut[0], worker("a"))


def test_a_prompt_that_is_too_long_for_the_scorers_waits() -> None:
    long = msgspec.structs.replace(scored(1), length=80)
    assert place([long, scored(2)], [worker("a"), scorer("b", context=50)], {}) == [Placement("r2", "b")]


def test_a_scored_prompt_is_read_whole_so_a_cached_prefix_attracts_nothing() -> None:
    workers = [scorer("a", slots=8, running=6), scorer("b", slots=8)]
    prefixes = cached("e", "a")
    assert place([waiting(1, episode="e")], workers, prefixes) == [Placement("r1", "a")]
    assert place([scored(1, episode="e")], workers, prefixes) == [Placement("r1", "b")]


def test_the_queue_knows_which_of_its_members_are_to_be_scored() -> None:
    queue = RolloutQueue()
    for one in (scored(1), waiting(2), scored(3)):
        queue.add(one)
    assert [one.rollout_id for one in queue.scoring()] == ["r1", "r3"]
    queue.take("r1")
    queue.remove("r2")
    assert [one.rollout_id for one in queue.scoring()] == ["r3"]
    queue.add(waiting(3))
    assert not queue.scoring()


def test_prompts_are_given_up_once_nobody_could_score_them_for_a_while() -> None:
    queue = [scored(1, since=0.0), scored(2, since=50.0), waiting(3)]

    def given_up(scorerless: float, now: float) -> list[str]:
        return [one.rollout_id for one in unscored(queue, scorerless, now=now, grace_s=30.0)]

    assert given_up(40.0, 69.0) == []
    assert given_up(40.0, 70.0) == ["r1"]
    assert given_up(40.0, 80.0) == ["r1", "r2"]
    assert given_up(0.0, 30.0) == ["r1"]
