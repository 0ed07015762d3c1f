"""A batch of requests is drafted from what their group made here, step after step."""

from collections.abc import Sequence
from random import Random
from typing import Any

from tests.fakes.verifying_worker import VerifyingWorker


def text(length: int = 200, seed: int = 1) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(4, 1_000_000) for _ in range(length)]


def after_one(response: Sequence[int]) -> VerifyingWorker:
    """A worker that has made the response once, before another member of the group comes."""
    worker = VerifyingWorker({"early": response})
    worker.run()
    assert worker.steps == len(response), "nothing repeats in it"
    worker.join("late", response)
    return worker


def test_a_member_that_follows_another_one_takes_fewer_steps() -> None:
    worker = after_one(text())
    worker.run()
    assert worker.made == 400
    assert worker.steps - 200 < 60
    report = worker.batch.report
    assert report["accepted"] == report["drafted"] > 130
    assert report["drafted"] <= 4 * report["drafts"]


def test_a_moved_rollout_brings_what_it_had_for_the_others_of_its_group() -> None:
    worker = VerifyingWorker({"moved": text()}, moved=150)
    worker.step()
    worker.join("late", text())
    worker.run()
    assert worker.steps < 100


def test_a_draft_that_was_refused_is_counted_as_such() -> None:
    worker = after_one(text())
    worker.responses["late"] = [one if place % 8 else 3 for place, one in enumerate(text())]
    worker.run()
    report = worker.batch.report
    assert worker.made == 400
    assert 50 < report["accepted"] < report["drafted"]


def test_after_an_install_nothing_that_others_made_before_is_drafted() -> None:
    worker = after_one(text())
    worker.batch.install()
    assert (worker.batch.report["tree_bytes"], worker.batch.report["groups"]) == (0, 0)
    worker.run()
    assert worker.batch.report["accepted"] == 0


def test_all_drafts_of_a_step_together_fit_into_what_the_engine_takes() -> None:
    worker = VerifyingWorker({f"r{number}": [5, 6, 7, 8] * 20 for number in range(6)}, most=13)
    drafted = []
    for _ in range(10):
        worker.step()
        drafted.append(worker.drafted)
    assert max(drafted) == 12


def test_requests_without_a_group_or_room_or_with_barred_ends_are_not_drafted() -> None:
    changes: Sequence[dict[str, Any]] = [{"source": None}, {"room": 0}, {"fixed": True}]
    for change in changes:
        worker = after_one(text())
        for _ in range(20):
            worker.step(**change)
            assert worker.drafted == 0
