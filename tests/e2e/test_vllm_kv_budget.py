"""A real engine whose keys and values are cut: it obeys at once, loses no token, and goes on exactly."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.facts import Facts, facts_of
from tests.e2e.tolerances import within

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def facts(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Facts:
    page = tmp_path_factory.mktemp("grants") / "worker.page"
    return facts_of("kv_budget_facts", make_checkpoint(1), page)


def assert_the_same(whole: list[Facts], other: list[Facts]) -> None:
    assert [answer["ids"] for answer in other] == [answer["ids"] for answer in whole]
    for one, two in zip(whole, other, strict=True):
        assert two["logprobs"] == pytest.approx(one["logprobs"], abs=within(1e-3))
        assert two["finish"] == one["finish"]


def test_what_was_cut_again_and_again_is_token_for_token_what_it_would_have_been(facts: Facts) -> None:
    assert len({tuple(answer["ids"]) for answer in facts["whole"]}) == len(facts["whole"])
    for run in facts["runs"]:
        assert len(run["cuts"]) >= 5, "it was over before it was cut"
        assert_the_same(facts["whole"], run["answers"])


def test_no_more_blocks_are_used_than_allowed_from_a_step_behind_a_cut_on(facts: Facts) -> None:
    for run in facts["runs"]:
        assert run["over"] == 0
        assert sorted(run["seconds"])[len(run["seconds"]) // 2] < 0.1


def test_cuts_cost_computing_again_and_without_cuts_nothing_is_computed_twice(facts: Facts) -> None:
    assert facts["recomputed_uncut"] == 0
    assert facts["recomputed"] > 0


def test_without_a_block_all_wait_and_cost_nothing(facts: Facts) -> None:
    starved = facts["starved"]
    assert starved["still"]
    assert starved["running"] == 0
    assert starved["waiting"] == len(facts["whole"])
    assert starved["cpu"] < 0.25, "it should sleep, not spin"


def test_with_room_for_one_they_go_one_by_one_and_all_are_finished(facts: Facts) -> None:
    assert_the_same(facts["whole"], facts["one_by_one"])


def test_an_engine_that_is_paused_gives_its_blocks_back_too(facts: Facts) -> None:
    assert facts["standing"]["used"] > 2
    assert facts["standing"]["seconds"] < 0.5
    assert_the_same(facts["whole"], facts["after_standing"])


def test_memory_that_is_given_back_is_the_systems_again(facts: Facts) -> None:
    assert facts["freed_bytes"] > facts["standing"]["used"] * facts["block_bytes"] / 2


def test_a_cut_gives_memory_back_while_there_is_nothing_to_schedule_too(facts: Facts) -> None:
    assert facts["residency"]["idle_freed"] > 8 * facts["block_bytes"]


def test_nothing_is_left_behind(facts: Facts) -> None:
    assert facts["used_at_end"] == 0


def test_weights_go_away_and_come_back_under_requests_that_go_on_exactly(facts: Facts) -> None:
    moved = facts["residency"]
    assert moved["still"]
    assert moved["used"] == 0
    assert_the_same(facts["whole"], moved["answers"])
    assert_the_same(facts["whole"], moved["after"])
    assert 0 < moved["wake_s"][0] < moved["wake_s"][1] < 30


def test_each_level_gives_memory_back(facts: Facts) -> None:
    awake, host, away = facts["residency"]["resident"]
    # What was used of the pool, and most of 1.6 MB of weights.
    assert awake - host > 16 * facts["block_bytes"]
    assert host - away > 1_000_000


def test_an_engine_that_sleeps_as_on_a_gpu_goes_on_exactly_and_only_when_nothing_pauses_it(facts: Facts) -> None:
    assert len(facts["sleep"]["levels"]) == 2
    for level in facts["sleep"]["levels"]:
        assert level["still"], "it neither computes nor installs while its memory is away"
        assert level["held"], "waking is no reason to go on"
        assert_the_same(facts["whole"], level["answers"])
