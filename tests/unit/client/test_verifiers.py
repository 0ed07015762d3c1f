"""What a run's spec becomes for verifiers, when groups begin, and what becomes of an episode."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.types.parse import parse
from ebbtide.types.run import Run, RunSpec, RunStatus, Sampling, check_spec
from ebbtide.types.weights import PolicyVersion
from ebbtide.verifiers import (
    FAILED,
    NOT_TRAINED,
    EpisodePlayer,
    GatewaySessions,
    environment_config,
    groups_wanted,
    sampling_config,
)

SIZES = {"groups_per_step": 2, "group_size": 2}


def spec_of(name: str = "verifiers:game", **params: Any) -> RunSpec:
    spec = {"name": "r", "model": "m", "environment": {"name": name, "params": params}, "batch": SIZES}
    return check_spec(parse(RunSpec, spec | {"trainer": {"steps": 2}}))


def test_a_run_names_a_taskset_or_an_environment_with_one() -> None:
    agent = {"max_turns": 4}
    assert environment_config(spec_of(agent=agent)) == {"id": "", "taskset": {"id": "game"}, "agent": agent}
    config = environment_config(spec_of("verifiers:user-sim+game", taskset={"split": "train"}))
    assert config == {"id": "user-sim", "taskset": {"id": "game", "split": "train"}}
    assert spec_of().from_agents


@pytest.mark.parametrize(
    ("name", "params", "field"),
    [
        ("agents", {}, "environment.name"),
        ("verifiers:", {}, "environment.name"),
        ("verifiers:user-sim+", {}, "environment.name"),
        ("other:game", {}, "environment.name"),
        ("verifiers:game", {"id": "x"}, "environment.params"),
        ("verifiers:game", {"taskset": {"id": "x"}}, "environment.params"),
    ],
)
def test_a_spec_that_names_none_or_two_is_refused(name: str, params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        environment_config(spec_of(name, **params))
    assert refused.value.field == field


def test_requests_sample_as_the_spec_says() -> None:
    assert sampling_config(Sampling(max_tokens=9)) == {"temperature": 1.0, "max_tokens": 9}
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, min_tokens=2, stop=("x",))
    asked = {"temperature": 0.5, "max_tokens": 512, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "min_tokens": 2}
    assert sampling_config(sampling) == asked | {"stop": ["x"]}


def test_groups_are_wanted_for_one_step_at_a_time_and_for_those_that_the_trainer_lost() -> None:
    run = Run(run_id="r", spec=spec_of(), newest=PolicyVersion(policy="policy", version=1))
    assert groups_wanted(run.spec, run) == 2
    later = replace(run, newest=PolicyVersion(policy="policy", version=2, step=1), dropped={"too_stale": 1, FAILED: 9})
    assert groups_wanted(run.spec, later) == 5
    last = replace(run, newest=PolicyVersion(policy="policy", version=3, step=2))
    assert groups_wanted(run.spec, last) == 4, "no step follows the last one"


class Gateway:
    """Notes what is called, and answers with `statuses` first."""

    def __init__(self, *statuses: int) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.statuses = list(statuses)

    def sessions(self) -> GatewaySessions:
        def answer(request: httpx.Request) -> httpx.Response:
            assert request.url.params["model"] == "r"
            self.calls.append((request.url.path, json.loads(request.content)))
            return httpx.Response(self.statuses.pop(0) if self.statuses else 200, text="told")

        return GatewaySessions(httpx.Client(transport=httpx.MockTransport(answer), base_url="http://gateway"), "r")


def test_a_call_is_repeated_while_the_gateway_has_no_room_and_an_ended_session_is_no_error_then() -> None:
    gateway = Gateway(503, 429, 409)
    gateway.sessions().reward("s", 0.5)
    assert gateway.calls == [("/v1/sessions/s/end", {"reward": 0.5})] * 3
    with pytest.raises(EbbtideError, match="409: told"):
        Gateway(409).sessions().reward("s", 0.5)
    with pytest.raises(EbbtideError, match="400: told"):
        Gateway(400).sessions().open("s", "g")


class Episodes:
    """An environment of verifiers whose episodes go as they are told: (reward, ok, further traces)."""

    def __init__(self, *outcomes: tuple[float, bool, int]) -> None:
        self.outcomes = list(outcomes)
        self.taskset = SimpleNamespace(bounded=True, shuffle=lambda seed: [f"task {seed}"])
        self.begun = 0

    async def run_episode(self, task: Any, context: Any, *, on_trace: Any) -> Any:
        reward, ok, further = self.outcomes.pop(0) if self.outcomes else (1.0, True, 0)
        traces = []
        for number in range(1 + further):
            self.begun += 1
            agent = SimpleNamespace(trainable=number == 0)
            traces.append(SimpleNamespace(id=f"t{self.begun}", agent=agent, reward=reward, errors=[]))
            on_trace(traces[-1])
        await asyncio.sleep(0)
        return SimpleNamespace(ok=ok, traces=traces, errors=[SimpleNamespace(type="Broken", message="glass")])


class Coordinator:
    """Ends the run once so many rewards have come."""

    def __init__(self, gateway: Gateway, rewards: int) -> None:
        self.gateway, self.rewards = gateway, rewards

    async def run(self, run_id: str) -> Run:
        rewarded = sum("reward" in body for _, body in self.gateway.calls)
        status = RunStatus.FINISHED if rewarded >= self.rewards else RunStatus.RUNNING
        return Run(run_id=run_id, spec=spec_of(), status=status, newest=PolicyVersion(policy="policy", version=1))


async def play(episodes: Episodes, gateway: Gateway) -> EpisodePlayer:
    coordinator: Any = Coordinator(gateway, rewards=4)
    run = Run(run_id="r", spec=spec_of())
    player = EpisodePlayer(coordinator, run, episodes, None, gateway.sessions())
    assert (await player.play()).status is RunStatus.FINISHED
    return player


async def test_each_trace_of_the_policy_is_a_session_in_its_group_and_others_are_dropped() -> None:
    gateway = Gateway()
    player = await play(Episodes((0.25, True, 1)), gateway)
    assert player.played == 4
    groups = {body["session_id"]: body.get("group_id") for path, body in gateway.calls if path == "/v1/sessions"}
    of_policy = [group for group in groups.values() if group]
    assert sorted(map(of_policy.count, set(of_policy))) == [2, 2]
    ends = {path.split("/")[3]: body for path, body in gateway.calls if path.endswith("/end")}
    assert sorted(body["reward"] for body in ends.values() if "reward" in body) == [0.25, 1.0, 1.0, 1.0]
    (other,) = [name for name, group in groups.items() if not group]
    assert ends[other] == {"drop_reason": NOT_TRAINED}


async def test_an_episode_that_the_end_of_its_run_overtakes_is_no_error() -> None:
    gateway = Gateway(*[200] * 7, 404)  # four sessions begin; the last reward finds no run
    player = await play(Episodes(), gateway)
    assert player.played == 3


@pytest.mark.parametrize("outcome", [(1.0, False, 0), (float("nan"), True, 0)])
async def test_a_failed_episode_is_dropped_and_another_is_played_in_its_place(
    outcome: tuple[float, bool, int],
) -> None:
    gateway = Gateway()
    player = await play(Episodes(outcome), gateway)
    assert player.played == 4
    ends = [body for path, body in gateway.calls if path.endswith("/end")]
    assert ends.count({"drop_reason": FAILED}) == 1
    assert ends.count({"reward": 1.0}) == 4


async def test_a_task_whose_episodes_fail_again_and_again_ends_the_play() -> None:
    with pytest.raises(EbbtideError, match="again and again, at last so: Broken: glass"):
        await play(Episodes(*[(1.0, False, 0)] * 99), Gateway())
