"""Trackers hold a run's own figures by the names that people know, and what goes wrong with them ends no run."""

import asyncio
import json
import struct
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from ebbtide.errors import InvalidRequest
from ebbtide.trainer import trackers, training
from ebbtide.trainer.service import train
from ebbtide.trainer.settings import check_wandb
from ebbtide.trainer.trackers import JsonLines, TensorBoard, crc32c, plot_name, progress_of
from ebbtide.trainer.tracking import (
    RUN_FIGURES,
    STEP_FIGURES,
    Progress,
    Record,
    RunTracking,
    Sample,
    all_figures,
    evaluation_figures,
    run_figures,
    spread,
    step_figures,
)
from ebbtide.types.run import RunEvent, RunStatus
from tests.support.waiting import wait_until
from tests.unit.trainer.trained_runs import SETTINGS, feed, make_spec, make_trajectories, train_to_end

FOLDER = "run-1"
#: Of each line, beside its figures.
HEAD = {"kind", "step", "seconds", "cursor", "preempted"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fields_of(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: numbers, and integers, floats, doubles or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        elif key & 7 == 2:
            size = varint()
            yield key >> 3, message[at : at + size]
            at += size
        else:
            form, size = ("<d", 8) if key & 7 == 1 else ("<f", 4)
            yield key >> 3, struct.unpack_from(form, message, at)[0]
            at += size


def tensorboard_events(folder: Path) -> list[dict[int, Any]]:
    """The events of all files in a folder, whose checksums are right."""
    events = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            for begin, length in ((at, 8), (at + 12, size)):
                (stated,) = struct.unpack_from("<I", data, begin + length)
                rotated = (stated - 0xA282EAD8) & 0xFFFFFFFF
                assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == crc32c(data[begin : begin + length])
            events.append(dict(fields_of(data[at + 12 : at + 12 + size])))
            at += 16 + size
    return events


def scalars(event: dict[int, Any]) -> dict[str, float]:
    values = [dict(fields_of(value)) for number, value in fields_of(event.get(5, b"")) if number == 1]
    return {value[1].decode(): value[2] for value in values if 2 in value}


def test_the_checksum_is_crc_32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


async def test_the_files_of_a_run_hold_its_own_figures(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    spec = make_spec(tiny_model, tmp_path, environment={"name": "reasoning_gym"})
    cluster = make_cluster(spec, lambda request: None)
    cluster.run = msgspec.structs.replace(cluster.run, counters={"tokens_lost_at_most": 7})
    values = {"step": 0.0, "version": 1.0, "problems": 8.0, "accuracy": 0.25, "mean_reward": 0.5, "mean_length": 6.0}
    cluster.emit(RunEvent(kind="evaluation", key="0", values=values))
    cluster.emit(RunEvent(kind="resumed", values={"offset": 3.0}, labels={"rollout": "r1", "from": "a", "to": "b"}))
    await train_to_end(cluster, make_client(cluster))
    found = lines(tmp_path / FOLDER / "metrics.jsonl")
    evaluation, steps = found[0], found[1:]
    assert (evaluation["kind"], evaluation["step"], evaluation["eval_accuracy"]) == ("evaluation", 0, 0.25)
    assert evaluation["eval_completions/mean_length"] == 6.0
    events = cluster.named("step")
    assert [line["step"] for line in steps] == [1, 2, 3, 4] == [event.values["step"] for event in events]
    for line, event in zip(steps, events, strict=True):
        figures = step_figures(event.values, environment="reasoning_gym")
        assert figures.items() <= line.items()
        assert line["reward"] == line["rewards/reasoning_gym/mean"] == event.values["reward"]
        assert line["completions/mean_length"] == event.values["response_length"]
        assert line["step_time"] == pytest.approx(sum(line[f"time/{name}"] for name in training._PHASES))
        assert (line["rollouts/preempted"], line["tokens/regenerated"]) == (1, 7)
    plotted = [event for event in tensorboard_events(tmp_path / FOLDER / "tensorboard") if 5 in event]
    assert [event.get(2, 0) for event in plotted] == [line["step"] for line in found]
    for event, line in zip(plotted, found, strict=True):
        figures = {name: value for name, value in line.items() if name not in HEAD}
        assert scalars(event) == pytest.approx({plot_name(name): value for name, value in figures.items()}, rel=1e-6)


async def test_samples_are_a_table_of_texts_from_the_worst_reward_to_the_best(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    from transformers import AutoTokenizer

    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    await train_to_end(cluster, make_client(cluster))
    rows = [line for line in lines(tmp_path / FOLDER / "samples.jsonl") if line["step"] == 3]
    trained = {one.episode_id: one for one in make_trajectories(cluster.run.spec, 2, 3)}
    rewards = sorted(one.reward for one in trained.values())
    assert len(rows) == SETTINGS.tracked_samples
    assert [row["reward"] for row in rows] == sorted(row["reward"] for row in rows)
    assert (rows[0]["reward"], rows[-1]["reward"]) == (rewards[0], rewards[-1])
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for row in rows:
        one = trained[row["episode"]]
        assert tokenizer.decode([3, 10 + int(one.group_id[-1]), 4]) == row["prompt"]
        assert (row["tokens"], row["versions"], row["group"]) == (len(one.loss_mask), "3", one.group_id)
    tables = [event for event in tensorboard_events(tmp_path / FOLDER / "tensorboard") if 5 in event]
    assert any(b"train/completions" in event.get(5, b"") for event in tables)


async def test_a_restarted_trainer_tracks_each_event_once_and_says_what_it_repeats(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    client = make_client(cluster)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(cluster))
        first = asyncio.create_task(train(client, cluster.lease("trainer"), SETTINGS))
        await wait_until(lambda: len(cluster.named("step")) == 3)
        first.cancel()
        await asyncio.wait({first})
        with (tmp_path / FOLDER / "metrics.jsonl").open("ab") as file:
            file.write(b'{"kind": "st')  # a kill in the middle of a line
        tasks.create_task(train(client, cluster.lease("trainer"), SETTINGS))
    found = lines(tmp_path / FOLDER / "metrics.jsonl")
    told = [event for event in cluster.events if event.kind in {"step", "resumed"}]
    assert [(line["kind"], line["step"], line["cursor"]) for line in found] == [
        (event.kind, event.values["step"], event.cursor) for event in told
    ]
    assert [line["step"] for line in found if line["kind"] == "resumed"] == [2]
    sessions = [event for event in tensorboard_events(tmp_path / FOLDER / "tensorboard") if 7 in event]
    assert [event[2] for event in sessions] == [3]


@dataclass
class Stub:
    """A tracker that keeps what it is given, and may fail or hang."""

    fails: bool = False
    waits: Any = None
    records: list[Record] = field(default_factory=list)

    def write(self, record: Record) -> None:
        if self.waits is not None:
            self.waits.wait()
        if self.fails:
            raise OSError("no space left on device")
        self.records.append(record)

    def close(self) -> None:
        pass


async def tracked(cluster: Any, client: Any, stubs: dict[str, Stub]) -> RunTracking:
    made = {name: partial(lambda stub: stub, stub) for name, stub in stubs.items()}
    tracking = RunTracking(client, "run-1", environment="e", trackers=made, progress=Progress(), samples=2)
    async with asyncio.timeout(30):
        await tracking.run()
        await tracking.close(1.0)
    return tracking


def steps(cluster: Any, count: int) -> None:
    for step in range(1, count + 1):
        cluster.emit(RunEvent(kind="step", key=str(step), values={"step": float(step), "reward": 0.5}))
    cluster.finish(RunStatus.FINISHED, "")


async def test_a_tracker_that_fails_or_hangs_costs_neither_the_run_nor_other_trackers(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.trainer.tracking._WRITE_S", 0.2)
    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    steps(cluster, 5)
    released = threading.Event()
    stubs = {"broken": Stub(fails=True), "hanging": Stub(waits=released), "sound": Stub()}
    await tracked(cluster, make_client(cluster), stubs)
    released.set()
    assert [record.step for record in stubs["sound"].records] == [1, 2, 3, 4, 5]
    assert stubs["broken"].records == []


async def test_events_that_make_no_sense_are_left_out_and_told_once(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    for key in ("odd", "again"):
        cluster.emit(RunEvent(kind="step", key=key, values={"step": float("nan")}))
    steps(cluster, 2)
    sound = Stub()
    with capture_logs() as logs:
        await tracked(cluster, make_client(cluster), {"sound": sound})
    assert [record.step for record in sound.records] == [1, 2]
    assert len([one for one in logs if "not understood" in one["event"]]) == 1


async def test_the_log_says_why_a_run_is_not_tracked_any_more(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(make_cluster(make_spec(tiny_model, tmp_path), lambda request: None))

    async def broken(*_: Any) -> AsyncGenerator[RunEvent, None]:
        for event in (RunEvent(kind="step", key="known"), RunEvent(kind="step", key="unknown")):
            if event.key == "unknown":
                raise ValueError("an event of another release")
            yield event

    monkeypatch.setattr(client, "watch", broken)
    with capture_logs() as logs:
        await tracked(None, client, {})
    assert ["ValueError" in one["reason"] for one in logs if "not tracked any more" in one["event"]] == [True]


async def test_a_run_is_trained_to_its_end_where_no_tracker_can_write(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "tensorboard").write_text("a file where the folder should be")
    (tmp_path / FOLDER / "samples.jsonl").mkdir()
    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    await train_to_end(cluster, make_client(cluster))
    assert cluster.run.status is RunStatus.FINISHED
    assert len(cluster.named("step")) == 4


async def test_what_was_read_long_after_its_time_says_nothing_of_the_runs_counters(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    cluster.emit(RunEvent(kind="step", key="1", values={"step": 1.0}, age_s=10.0))
    cluster.emit(RunEvent(kind="step", key="2", values={"step": 2.0}, age_s=990.0))
    cluster.run = msgspec.structs.replace(cluster.run, age_s=1000.0)
    cluster.finish(RunStatus.FINISHED, "")
    stub = Stub()
    await tracked(cluster, make_client(cluster), {"sound": stub})
    assert ["rollouts/preempted" in record.figures for record in stub.records] == [False, True]


def test_every_figure_has_one_name_and_every_source_one_figure() -> None:
    for _, figures in all_figures():
        assert len({figure.name for figure in figures}) == len(figures)
        sources = [figure.source for figure in figures if figure.source]
        assert len(set(sources)) == len(sources)


async def test_no_value_of_a_step_is_without_a_figure(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(
        make_spec(tiny_model, tmp_path, trainer={"kl_coefficient": 0.1, "streaming": True, "minibatches": 1}),
        lambda request: None,
    )
    await train_to_end(cluster, make_client(cluster))
    reported = {name for event in cluster.named("step") for name in event.values}
    assert reported - {"step"} <= {figure.source for figure in STEP_FIGURES}


def test_a_value_of_another_trainer_keeps_its_name() -> None:
    assert step_figures({"step": 3.0, "reward": 0.5, "perplexity": 2.0}, environment="mine") == {
        "reward": 0.5,
        "rewards/mine/mean": 0.5,
        "perplexity": 2.0,
    }
    assert evaluation_figures({"step": 3.0, "pass_at_4": 0.5}) == {"eval_pass_at_4": 0.5}
    assert run_figures({}, preempted=2).keys() == {figure.name for figure in RUN_FIGURES}


def test_samples_are_spread_over_the_rewards(tiny_model: Path, tmp_path: Path) -> None:
    made = make_trajectories(make_spec(tiny_model, tmp_path), 0, 1)
    ordered = sorted(made, key=lambda one: one.reward)
    assert spread(made, 2) == [ordered[0], ordered[-1]]
    assert spread(made, 0) == []
    assert spread(made, 100) == ordered


def test_a_table_of_samples_keeps_its_columns_whatever_a_model_writes(tmp_path: Path) -> None:
    text = "a | b\n# no heading <script>"
    sample = Sample(step=1, group="g", episode="e", prompt=text, completion=text, reward=0.5, tokens=3, versions="1-2")
    tracker = TensorBoard(tmp_path, lambda: 1.0)
    tracker.write(Record(kind="step", step=1, cursor="1", seconds=2.0, samples=(sample,)))
    tracker.close()
    (event,) = [event for event in tensorboard_events(tmp_path) if 5 in event]
    row = event[5].decode(errors="replace").splitlines()[-1]
    assert row.count(" | ") == len(Sample.__struct_fields__) - 1
    assert r"a \| b ⏎ \# no heading \<script\>" in row


def test_progress_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    assert progress_of(tmp_path) == Progress()
    tracker = JsonLines(tmp_path)
    tracker.write(Record(kind="step", step=1, cursor="5-1", seconds=2.0, figures={"rollouts/preempted": 4.0}))
    tracker.write(Record(kind="evaluation", step=1, cursor="7-0", seconds=2.0, preempted=6))
    tracker.close()
    with (tmp_path / trackers.METRICS_FILE).open("ab") as file:
        file.write(b'{"kind":"step","cur')
    assert progress_of(tmp_path) == Progress("7-0", 6)


async def test_rollouts_that_were_resumed_before_an_evaluation_are_counted_after_a_restart(
    tiny_model: Path, tmp_path: Path, make_cluster: Any, make_client: Any
) -> None:
    cluster = make_cluster(make_spec(tiny_model, tmp_path), lambda request: None)
    cluster.emit(RunEvent(kind="step", key="1", values={"step": 1.0}))
    cluster.emit(RunEvent(kind="resumed", key="r1", labels={"rollout": "r1"}))
    cluster.emit(RunEvent(kind="evaluation", key="1", values={"step": 1.0}))
    cluster.finish(RunStatus.FINISHED, "")
    files = {"jsonl": partial(JsonLines, tmp_path)}
    client = make_client(cluster)
    tracking = RunTracking(client, "run-1", environment="e", trackers=files, progress=Progress(), samples=0)
    async with asyncio.timeout(30):
        await tracking.run()
        await tracking.close(5.0)
    assert progress_of(tmp_path).preempted == 1


def test_a_figure_beyond_float32_is_infinite_and_keeps_the_others(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path, lambda: 0.0)
    tracker.write(Record(kind="step", step=1, cursor="1-0", seconds=0.0, figures={"kl": -1e39, "reward": 0.5}))
    tracker.close()
    (event,) = [event for event in tensorboard_events(tmp_path) if 5 in event]
    assert scalars(event) == {"train/kl": float("-inf"), "train/reward": 0.5}


def test_a_project_without_its_client_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.trainer.settings.find_spec", lambda name: None)
    check_wandb("")
    with pytest.raises(InvalidRequest, match=r"wandb_project.*ebbtide\[wandb\]"):
        check_wandb("mine")
