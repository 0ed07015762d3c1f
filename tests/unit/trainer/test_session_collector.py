"""Sessions count once in their group, each step takes the first whole groups, and every branch is told exactly once."""

from typing import Any

import msgspec
import numpy as np
import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.trainer.collectors import SessionCollector
from ebbtide.trainer.learning.training_batches import samples_of, summary
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import RunSpec, TrainerSpec, check_spec
from ebbtide.types.tokens import pack_ids, pack_tokens

STEPS = {1: 0, 2: 1, 3: 2, 4: 3}
SPEC = msgspec.convert(
    {
        "name": "run",
        "model": "/models/m",
        "environment": {"name": "agents"},
        "batch": {"groups_per_step": 2, "group_size": 2, "max_staleness": 1},
        "trainer": {"steps": 3},
    },
    RunSpec,
)


def session(name: str, *, branches: int = 1, version: int = 1, reward: float = 0.0) -> list[Trajectory]:
    """The branches of a session `group.name`. The second begins with the first one's tokens, masked."""
    made = []
    for number in range(branches):
        ids = [7] * number + [number + 1]
        made.append(
            Trajectory(
                episode_id=f"{name}.{number}",
                group_id=name.partition(".")[0],
                step=0,
                group_size=2,
                prompt_ids=pack_ids([1]),
                tokens=pack_tokens(ids, [-1.0] * len(ids), [0] * number + [version]),
                loss_mask=bytes([0] * number + [1]),
                reward=reward,
                cursor=f"{name}.{number}",
                session_id=name,
                branches=branches,
            )
        )
    return made


def collector(step: int = 0) -> SessionCollector:
    return SessionCollector(SPEC, STEPS, step=step)


def add(to: SessionCollector, *sessions: list[Trajectory]) -> None:
    for one in sessions:
        for branch in one:
            to.add(branch)


def told(of: SessionCollector) -> dict[str, str]:
    return {one.episode_id: one.drop_reason for one in of.uncommitted}


def test_a_group_is_whole_by_its_sessions_and_not_by_their_branches() -> None:
    made = collector()
    add(made, session("g.a", branches=3))
    assert made.whole_groups() == 0
    (first, second) = session("g.b", branches=2)
    made.add(first)
    assert made.whole_groups() == 0
    made.add(second)
    assert made.whole_groups() == 1


def test_a_step_takes_the_first_complete_groups_and_leaves_the_others_for_the_next() -> None:
    made = collector()
    add(made, session("x.a"), session("g.a"), session("g.b"), session("h.a"), session("h.b"), session("i.a"))
    add(made, session("i.b"), session("x.b"))
    assert made.whole_groups() == 2
    assert [one.episode_id for one in made.take(STEPS)] == ["g.a.0", "g.b.0", "h.a.0", "h.b.0"]
    assert made.whole_groups() == 2
    assert [one.group_id for one in made.take(STEPS)] == ["i", "i", "x", "x"]
    assert set(told(made).values()) == {""}


def test_what_is_there_early_changes_nothing_in_what_a_step_takes() -> None:
    """As after a restart: the stream has what came later, too."""
    stream = [session(f"{group}.{number}", version=1 + number % 2) for number in range(4) for group in "ghijk"]
    early, late = collector(), collector()
    add(early, *stream)
    took: dict[str, list[list[str]]] = {"early": [], "late": []}
    rest = iter(stream)
    for _ in range(2):
        while late.whole_groups() < 2:
            add(late, next(rest))
        assert early.whole_groups() == 2
        took["late"].append([one.episode_id for one in late.take(STEPS)])
        took["early"].append([one.episode_id for one in early.take(STEPS)])
    assert took["early"] == took["late"]


def test_a_whole_group_stays_as_it_was_handed_out() -> None:
    """A session that began first, and ends last, takes no place of a session that was trained on."""
    made = collector()
    slow = session("g.slow", branches=2)
    made.add(slow[0])
    add(made, session("g.a"), session("g.b"))
    assert made.new_groups() == 1
    assert [one.episode_id for one in made.hand_out(STEPS)] == ["g.a.0", "g.b.0"]
    made.add(slow[1])
    add(made, session("h.a"), session("h.b"))
    assert made.new_groups() == 1
    assert [one.episode_id for one in made.hand_out(STEPS)] == ["h.a.0", "h.b.0"]
    assert [one.episode_id for one in made.take(STEPS)] == ["g.a.0", "g.b.0", "h.a.0", "h.b.0"]
    assert (told(made)["g.slow.0"], told(made)["g.slow.1"]) == ("group_full", "group_full")
    assert made.new_groups() == 0


def test_a_session_with_a_token_that_is_too_stale_is_dropped_with_all_its_branches() -> None:
    made = collector(step=1)
    add(made, session("g.a", branches=2, version=1))
    assert made.whole_groups() == 0
    add(made, session("h.a", version=2), session("h.b", version=2), session("i.a", version=2), session("i.b"))
    assert made.whole_groups() == 2
    made.take(STEPS)
    assert {name: reason for name, reason in told(made).items() if reason} == dict.fromkeys(
        ["g.a.0", "g.a.1"], "too_stale"
    )
    add(made, session("h.c", version=1))
    assert made.whole_groups() == 0
    assert told(made)["h.c.0"] == "too_stale"


def test_sessions_beyond_their_groups_size_are_dropped_and_nothing_is_left_after_the_last_step() -> None:
    made = collector(step=2)
    add(made, session("g.a", version=3), session("g.b", version=3), session("g.c", version=3))
    add(made, session("h.a", version=3), session("h.b", version=3), session("i.a", version=3))
    assert made.whole_groups() == 2
    assert len(made.take(STEPS)) == 4
    add(made, session("i.b", version=3))
    assert (told(made)["g.c.0"], told(made)["i.a.0"], told(made)["i.b.0"]) == ("group_full", "too_stale", "too_stale")
    assert made.cursor() == "i.b.0"
    assert len(made.uncommitted) == 7


def test_reading_resumes_before_the_first_session_that_waits() -> None:
    made = collector()
    add(made, session("g.a"), session("g.b"), session("x.a"), session("h.a"), session("h.b"), session("i.a"))
    made.whole_groups()
    made.take(STEPS)
    assert made.cursor() == "g.b.0"
    again = SessionCollector(SPEC, STEPS, step=1, consumed=made.uncommitted, cursor=made.cursor())
    add(again, session("x.a"), session("h.a"), session("h.b"), session("i.a"), session("x.b"))
    assert again.whole_groups() == 1
    assert again.cursor() == "g.b.0"


def test_each_sampled_token_is_trained_once_and_sessions_not_branches_make_the_advantage() -> None:
    batch = [*session("g.a", branches=3, reward=1.0), *session("g.b", reward=0.0)]
    samples = samples_of(batch, TrainerSpec(normalize_std=False), seed=0, step=0)
    assert [sample.advantage for sample in samples] == [0.5, 0.5, 0.5, -0.5]
    assert sum(int(np.count_nonzero(sample.mask)) for sample in samples) == 4
    assert summary(batch, STEPS, step=0)["reward"] == 0.5


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        ({"name": "number_guessing", "verifiers": {"exact": "a:b"}}, "environment.verifiers: only sessions of agents"),
        ({"name": "agents", "verifiers": {"ex act": "a:b"}}, "environment.verifiers: must be"),
        ({"name": "agents", "verifiers": {"exact": "a.b"}}, "environment.verifiers.exact: 'a.b' is no verifier"),
        ({"name": "agents", "verifier": "exact"}, r"environment.verifier: must be one of environment.verifiers \(none"),
        ({"name": "agents", "verifiers": {f"v{n}": "a:b" for n in range(33)}}, "environment.verifiers: at most 32"),
    ],
)
def test_verifiers_are_functions_with_names_and_for_agents_alone(environment: dict[str, Any], part: str) -> None:
    spec = msgspec.convert(msgspec.to_builtins(SPEC) | {"environment": environment}, RunSpec)
    with pytest.raises(InvalidRequest, match=part):
        check_spec(spec)


def test_a_run_of_agents_has_no_problems_of_its_own() -> None:
    check_spec(SPEC)
    for field, changes in (
        ("environment.params", {"environment": {"name": "agents", "params": {"x": 1}}}),
        ("evaluation.problems", {"evaluation": {"problems": 4}}),
    ):
        spec = msgspec.convert(msgspec.to_builtins(SPEC) | changes, RunSpec)
        with pytest.raises(InvalidRequest, match=field):
            check_spec(spec)
