"""The machines of the elastic demo, planned from a spot trace and the cores that are there."""

import os
from pathlib import Path

import pytest

from ebbtide.demo.elastic.elastic_demo import elastic_spec
from ebbtide.demo.elastic.elastic_options import ElasticOptions, most_at_once, plan_machines
from ebbtide.errors import InvalidRequest
from ebbtide.lab_commands.demo import demo_elastic


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 0, 2, 1})


def trace(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


@pytest.mark.usefixtures("four_cores")
def test_without_a_trace_one_machine_at_a_time_is_lost_twice_in_two_minutes_again_and_again() -> None:
    plan = plan_machines(ElasticOptions())
    assert (plan.device_core, plan.cores, plan.at_begin) == (0, (1,), 1)
    assert [stay.begin_s for stay in plan.stays][:4] == pytest.approx([0.0, 54.0, 115.0, 169.0])
    assert [stay.end_s for stay in plan.stays][:4] == pytest.approx([45.0, 108.0, 160.0, 223.0])
    assert plan.stays[-1].begin_s > 3600


@pytest.mark.usefixtures("four_cores")
def test_at_most_as_many_machines_as_cores_are_there_and_one_core_is_the_trainers(tmp_path: Path) -> None:
    path = trace(tmp_path, "t_s,count\n0,2\n60,9\n120,1\n180,0\n")
    plan = plan_machines(ElasticOptions(trace=path))
    assert plan.cores == (1, 2, 3)
    assert most_at_once(plan.stays) == 3
    assert plan.at_begin == 2
    assert plan.what == "trace.csv, 60 s of it in a second, at most 3 at once, again and again"


@pytest.mark.usefixtures("four_cores")
def test_the_window_is_a_part_of_the_trace_and_its_speed_a_factor(tmp_path: Path) -> None:
    path = trace(tmp_path, "t_s,event,node\n0,add,a\n100,remove,a\n200,add,b\n300,remove,b\n")
    plan = plan_machines(ElasticOptions(trace=path, window="150:300", speed=10))
    assert [(stay.begin_s, stay.end_s) for stay in plan.stays][:2] == [(5.0, 15.0), (20.0, 30.0)]


@pytest.mark.usefixtures("four_cores")
def test_a_part_without_machines_and_a_window_that_is_none_are_refused_by_the_option(tmp_path: Path) -> None:
    path = trace(tmp_path, "t_s,event,node\n0,add,a\n100,remove,a\n200,add,b\n300,remove,b\n")
    with pytest.raises(InvalidRequest, match="--window: no machine is there"):
        plan_machines(ElasticOptions(trace=path, window="110:190"))
    with pytest.raises(InvalidRequest, match="--window: 'soon' is no window"):
        plan_machines(ElasticOptions(trace=path, window="soon"))


def test_one_core_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(InvalidRequest, match="cores: the trainer's device and a worker need a core each"):
        plan_machines(ElasticOptions())


def test_both_runs_are_that_of_the_demo_and_streamed() -> None:
    spec = elastic_spec(ElasticOptions(steps=5, seed=7))
    assert (spec.seed, spec.trainer.steps, spec.trainer.streaming, spec.batch.max_staleness) == (7, 5, True, 0)


def test_every_option_of_the_elastic_demo_reaches_it() -> None:
    assert set(demo_elastic.__annotations__) - {"return"} == set(ElasticOptions.__struct_fields__)
