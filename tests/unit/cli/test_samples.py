"""`ebbtide run samples`: what is shown of which episodes, and by whom they were generated."""

import io
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ebbtide.cli.views.samples import SAMPLES_FILE, Part, Passage, Sample, SampleFilter, fetch, print_samples, sample
from ebbtide.errors import InvalidRequest
from ebbtide.types.fleet import EndCause
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import AttemptSpan, EnvironmentSpec, Run, RunSpec, RunStatus
from ebbtide.types.tokens import pack_ids, pack_tokens

ALL = SampleFilter(most=100)


def letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def trajectory(
    episode: str, response: str, reward: float, *, mask: str = "", versions: Any = 3, **more: Any
) -> Trajectory:
    group = episode.rpartition(".")[0]
    ids = list(map(ord, response))
    fields: dict[str, Any] = {
        "step": int(group.split(".")[0][1:]), "group_size": 2, "prompt_ids": pack_ids(list(map(ord, "ask"))),
        "tokens": pack_tokens(ids, np.zeros(len(ids)), versions),
        "loss_mask": bytes(map(int, mask or "1" * len(ids))), "reward": reward,
    }  # fmt: skip
    return Trajectory(episode_id=episode, group_id=group, **(fields | more))


def span(episode: str, worker: str, first: int, last: int, turn: int = 0) -> AttemptSpan:
    return AttemptSpan(
        cursor="", rollout_id=f"{episode}.t{turn}", attempt_id=f"{episode}{worker}{first}", worker_id=worker,
        first=first, last=last, begin_s=0.0, end_s=1.0, end="", cause=EndCause.FINISHED, first_version=3,
        last_version=4, episode_id=episode, turn=turn,
    )  # fmt: skip


class FakeClient:
    def __init__(self, run: Run, trajectories: Sequence[Trajectory] = (), spans: Sequence[AttemptSpan] = ()) -> None:
        self._run, self._trajectories, self._spans = run, trajectories, spans

    async def run(self, run_id: str) -> Run:
        return self._run

    async def trajectories(self, run_id: str) -> AsyncGenerator[Trajectory, None]:
        for one in self._trajectories:
            yield one

    async def timeline(self, run_id: str) -> AsyncGenerator[AttemptSpan, None]:
        for one in self._spans:
            yield one


def make_run(output: Path, status: RunStatus = RunStatus.RUNNING, model: str = "", **counters: int) -> Run:
    spec = RunSpec(name="r", model=model, output=str(output), environment=EnvironmentSpec(name="e"))
    return Run(run_id="r1", spec=spec, status=status, counters=counters)


def test_a_sample_has_texts_of_policy_and_environment_apart_and_the_versions_that_sampled() -> None:
    versions = [3, 3, 0, 0, 4]
    one = sample(trajectory("s2.g1.0", "abXYc", 0.5, mask="11001", versions=versions, truncated=True), letters)
    assert (one.step, one.group, one.episode, one.reward, one.truncated) == (3, "s2.g1", "s2.g1.0", 0.5, True)
    assert one.prompt == "ask"
    assert one.response == [
        Passage(text="ab", sampled=True),
        Passage(text="XY", sampled=False),
        Passage(text="c", sampled=True),
    ]
    assert (one.tokens, one.first_version, one.last_version) == (3, 3, 4)


def samples() -> list[Sample]:
    rewards = {"s0.g0.0": 1.0, "s0.g0.1": 0.0, "s0.g1.0": 0.5, "s1.g0.0": 0.2}
    return [sample(trajectory(episode, "x", reward), letters) for episode, reward in rewards.items()]


@pytest.mark.parametrize(
    ("wanted", "episodes"),
    [
        (SampleFilter(), ["s0.g0.0", "s0.g0.1", "s0.g1.0", "s1.g0.0"]),
        (SampleFilter(most=2), ["s0.g0.0", "s0.g0.1"]),
        (SampleFilter(worst=True, most=2), ["s0.g0.1", "s1.g0.0"]),
        (SampleFilter(step=1, worst=True), ["s0.g0.1", "s0.g1.0", "s0.g0.0"]),
        (SampleFilter(group="s0.g1"), ["s0.g1.0"]),
        (SampleFilter(step=2, group="s0.g1"), []),
    ],
)
def test_step_group_and_worst_choose(wanted: SampleFilter, episodes: list[str]) -> None:
    assert [one.episode for one in wanted.chosen(reversed(samples()))] == episodes


async def test_what_the_coordinator_has_comes_with_the_workers_of_the_timeline(
    tiny_model: Path, tmp_path: Path
) -> None:
    from ebbtide.run_client import load_conversations

    spans = [
        span("s0.g0.0", "w2", 1, 3),
        span("s0.g0.0", "w1", 0, 1),
        span("s0.g0.1", "w3", 0, 3),
        span("other", "w4", 0, 9),
    ]
    text = load_conversations(str(tiny_model))
    ids = text._encode("abc", special=False)
    stored = [
        trajectory(f"s0.g0.{n}", "...", float(n), tokens=pack_tokens(ids, np.zeros(3), 3), prompt_ids=pack_ids(ids))
        for n in range(2)
    ]
    client: Any = FakeClient(make_run(tmp_path, model=str(tiny_model), trajectories=2), stored, spans)
    best, worst = await fetch(client, "r1", ALL)
    assert [(part.worker, part.first, part.last) for part in best.workers] == [("w1", 0, 1), ("w2", 1, 3)]
    assert [part.worker for part in worst.workers] == ["w3"]
    assert best.prompt == best.response[0].text == "abc"


async def test_of_earlier_steps_the_trainers_file_is_read_and_lines_that_a_kill_cut_are_left_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "r1").mkdir()
    row = {
        "step": 4,
        "group": "s3.g0",
        "episode": "s3.g0.1",
        "prompt": "p",
        "completion": "c",
        "reward": 0.5,
        "tokens": 7,
    }
    lines = [
        json.dumps({**row, "versions": "3-4"}),
        json.dumps({**row, "reward": 0.25, "versions": "4"}),
        '{"step": 5, "gr',
    ]
    (tmp_path / "r1" / SAMPLES_FILE).write_text("\n".join(lines))
    client: Any = FakeClient(make_run(tmp_path, RunStatus.FINISHED), spans=[span("s3.g0.1", "w1", 0, 7)])
    (one,) = await fetch(client, "r1", ALL)
    assert (one.step, one.reward, one.first_version, one.last_version) == (4, 0.25, 4, 4)
    assert (one.response, one.truncated) == ([Passage(text="c", sampled=True)], None)
    assert one.workers == [Part(worker="w1", turn=0, first=0, last=7, first_version=3, last_version=4)]


@pytest.mark.parametrize(
    ("status", "said"), [(RunStatus.FINISHED, "has ended"), (RunStatus.RUNNING, "not in a checkpoint yet")]
)
async def test_without_samples_the_error_says_where_they_would_be(tmp_path: Path, status: RunStatus, said: str) -> None:
    client: Any = FakeClient(make_run(tmp_path, status))
    with pytest.raises(InvalidRequest, match=f"{said}.*{SAMPLES_FILE}"):
        await fetch(client, "r1", ALL)


async def test_a_filter_that_fits_nothing_says_which_steps_there_are(tmp_path: Path, tiny_model: Path) -> None:
    stored = [trajectory("s4.g0.0", "abc", 0.0)]
    client: Any = FakeClient(make_run(tmp_path, model=str(tiny_model), trajectories=1), stored)
    with pytest.raises(InvalidRequest, match="some of steps 5"):
        await fetch(client, "r1", SampleFilter(step=2))


@pytest.mark.parametrize("worst", [False, True])
async def test_only_what_is_shown_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worst: bool) -> None:
    decoded: list[str] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(letters(ids))
        return decoded[-1]

    monkeypatch.setattr("ebbtide.cli.views.samples._decoder", lambda model: decode)
    stored = [trajectory(f"s4.g{n}.0", f"r{n}", (7 * n % 50) / 50) for n in range(50)]
    client: Any = FakeClient(make_run(tmp_path, trajectories=50), stored[::-1])
    shown = await fetch(client, "r1", SampleFilter(worst=worst, most=2))
    first = ["s4.g0.0", "s4.g43.0"] if worst else ["s4.g0.0", "s4.g1.0"]
    assert [one.episode for one in shown] == first
    assert len(decoded) == 2 * len(shown)  # prompt and response


async def test_where_the_model_is_not_here_the_error_names_the_option(tmp_path: Path) -> None:
    client: Any = FakeClient(make_run(tmp_path, model="/nope", trajectories=1), [trajectory("s4.g0.0", "abc", 0.0)])
    with pytest.raises(InvalidRequest, match=r"--model: .*is no directory"):
        await fetch(client, "r1", ALL)


async def test_a_model_of_the_hub_is_not_fetched_to_show_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.hub_models.cached_model", lambda model: None)
    monkeypatch.setattr("ebbtide.run_client.tokenizer_folder", lambda model: pytest.fail(f"{model} is fetched"))
    run = make_run(tmp_path, model="owner/large", trajectories=1)
    client: Any = FakeClient(run, [trajectory("s4.g0.0", "abc", 0.0)])
    with pytest.raises(InvalidRequest, match=r"--model: 'owner/large' is not in this machine's cache"):
        await fetch(client, "r1", ALL)


def test_texts_are_shown_without_what_a_terminal_would_obey() -> None:
    shown = io.StringIO()
    one = sample(trajectory("s0.g0.0", "\x1b[2Jred [bold]\nend", 1.0), letters)
    print_samples([one], Console(file=shown, width=200))
    assert "\x1b" not in shown.getvalue()
    assert "[2Jred [bold]⏎end" in shown.getvalue()
    assert "step 1 · reward 1 · version 3 · 18 tokens" in shown.getvalue()
