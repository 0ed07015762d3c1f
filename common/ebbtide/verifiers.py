"""Trains with an environment of verifiers: submits a run, and plays its episodes through a gateway until it has ended.

    python -m ebbtide.verifiers RUN.toml

The environment runs in this process, so start it in an environment of its own, which has verifiers, the environment's
package and Ebbtide's SDK; no other part of the cluster imports any of it. The run's `environment.name` is
`verifiers:TASKSET`, or `verifiers:ENV+TASKSET`, by verifiers' ids, and `environment.params` is verifiers' configuration
of the environment. Each trace of the policy is a session of the gateway, whose exact tokens the run trains on. Written
against verifiers 0.4.

Invariant: a group begins only while the run lacks groups for its next step, so few tokens are older than the newest
version. All that is known of episodes is lost with the process; one that is started again with the same run id begins
new groups, and what it had not finished is dropped as abandoned.
"""

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ebbtide.client.client import Client, client_security, read_spec
from ebbtide.errors import EbbtideError, InvalidRequest, Unavailable
from ebbtide.types.ids import new_fence
from ebbtide.types.run import VERIFIERS, Run, RunSpec, RunStatus, Sampling

if TYPE_CHECKING:
    import httpx

GATEWAY: Final = "http://127.0.0.1:7640"
#: Of the key, for verifiers' client. Programs of an environment do not inherit variables of such a name.
_KEY: Final = "EBBTIDE_GATEWAY_API_KEY"
_CREDENTIALS: Final = ("EBBTIDE_TOKEN", "EBBTIDE_TOKEN_FILE")
#: Why a session is dropped: its episode failed, and another one is played in its place; or it is not the policy's.
FAILED: Final = "episode_failed"
NOT_TRAINED: Final = "not_trainable"
#: A group of which so many episodes have failed shows a defect, no accident.
_MOST_FAILURES: Final = 16
_POLL_S: Final = 0.25
#: How long a call of the gateway is repeated while nobody answers.
_PATIENCE_S: Final = 60.0


def environment_config(spec: RunSpec) -> dict[str, Any]:
    """Verifiers' configuration of the run's environment. Raises `InvalidRequest` naming the field."""
    prefix, _, name = spec.environment.name.partition(":")
    environment, _, taskset = name.rpartition("+")
    if prefix != VERIFIERS or not taskset:
        text = f"{spec.environment.name!r} is no environment of verifiers; give {VERIFIERS}:TASKSET"
        raise InvalidRequest(text, field="environment.name")
    params = dict(spec.environment.params)
    given = params.pop("taskset", {})
    if "id" in params or not isinstance(given, Mapping) or "id" in given:
        raise InvalidRequest("environment.name has the ids; leave them out", field="environment.params")
    return {"id": environment, "taskset": {**given, "id": taskset}, **params}


def sampling_config(sampling: Sampling) -> dict[str, Any]:
    """What each request asks for, as an OpenAI-style body has it."""
    asked: dict[str, Any] = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
    if sampling.top_p < 1:
        asked["top_p"] = sampling.top_p
    further = {"top_k": sampling.top_k, "min_p": sampling.min_p, "min_tokens": sampling.min_tokens}
    asked |= {name: value for name, value in further.items() if value}
    if sampling.stop:
        asked["stop"] = list(sampling.stop)
    return asked


def groups_wanted(spec: RunSpec, run: Run) -> int:
    """The groups that a run needs for the step after the newest version's. A session that the trainer dropped may have
    made its group useless."""
    steps = run.newest.step if run.newest else 0
    spoilt = sum(number for reason, number in run.dropped.items() if reason not in (FAILED, NOT_TRAINED))
    return (min(steps, spec.trainer.steps - 1) + 1) * spec.batch.groups_per_step + spoilt


class GatewaySessions:
    """The routes of sessions. Calls may be made in any thread."""

    def __init__(self, http: "httpx.Client", run_id: str) -> None:
        self._http, self._query = http, {"model": run_id}

    def open(self, session_id: str, group_id: str) -> None:
        """Raises `EbbtideError`."""
        self._call("/v1/sessions", {"session_id": session_id, **({"group_id": group_id} if group_id else {})})

    def reward(self, session_id: str, reward: float) -> None:
        """End a session as trajectories. Raises `EbbtideError`."""
        self._call(f"/v1/sessions/{session_id}/end", {"reward": reward})

    def drop(self, session_id: str, reason: str) -> None:
        """End a session that is not trained on. Raises `EbbtideError`."""
        self._call(f"/v1/sessions/{session_id}/end", {"drop_reason": reason})

    def _call(self, path: str, body: Mapping[str, Any]) -> None:
        import httpx

        begun = time.monotonic()
        for attempt in count():
            try:
                answer = self._http.post(path, params=self._query, json=body)
            except httpx.TransportError as error:
                told = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code < 400 or (attempt and answer.status_code == 409):  # the first one did arrive
                    return
                told = f"{answer.status_code}: {answer.text[:300]}"
                if answer.status_code not in (429, 503):
                    raise EbbtideError(f"the gateway answered {path} with {told}")
            if time.monotonic() - begun > _PATIENCE_S:
                raise Unavailable(f"the gateway did not take {path} for {_PATIENCE_S:g} s, at last {told}")
            time.sleep(min(2.0, 0.1 * 2**attempt))


class EpisodePlayer:
    """Plays a run's episodes. `environment`: verifiers' `Env`, while it serves; `context`: its `ModelContext`."""

    def __init__(self, client: Client, run: Run, environment: Any, context: Any, sessions: GatewaySessions) -> None:
        self._client, self._run = client, run
        self._environment, self._context, self._sessions = environment, context, sessions
        self._tasks = _endless_tasks(environment.taskset, run.spec.seed)
        self.played = 0

    async def play(self) -> Run:
        """Play until the run has ended; returns it. Raises `EbbtideError` if the episodes of a group fail again and
        again, or have not exactly one trace that is trained on."""
        begun, following = 0, asyncio.create_task(self._ended())
        running: set[asyncio.Task[Any]] = {following}
        try:
            while not following.done():
                if begun == 0 and self._run.newest:
                    begun = self._run.newest.step * self._run.spec.batch.groups_per_step  # of a process before this
                while self._run.newest and begun < groups_wanted(self._run.spec, self._run):
                    running.add(asyncio.create_task(self._group(next(self._tasks))))
                    begun += 1
                done, _ = await asyncio.wait(running, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    running.discard(task)
                    try:
                        task.result()
                    except EbbtideError:
                        self._run = await self._client.run(self._run.run_id)
                        if not self._run.status.ended:  # an ended run takes no reward of the episodes that it overtook
                            raise
                        return self._run
            return self._run
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _ended(self) -> None:
        while not self._run.status.ended:
            self._run = await self._client.run(self._run.run_id)
            await asyncio.sleep(_POLL_S)

    async def _group(self, task: Any) -> None:
        group, failures = f"g-{new_fence()}", list[str]()
        await asyncio.gather(*(self._member(group, task, failures) for _ in range(self._run.spec.batch.group_size)))

    async def _member(self, group: str, task: Any, failures: list[str]) -> None:
        while (failure := await self._episode(group, task)) and not self._run.status.ended:
            failures.append(failure)
            if len(failures) >= _MOST_FAILURES:
                raise EbbtideError(f"the episodes of a task fail again and again, at last so: {failure}")

    async def _episode(self, group: str, task: Any) -> str:
        """Play one episode. Returns why it failed; empty: its reward is posted."""
        minted: dict[str, bool] = {}  # all sessions, and whether they are the policy's

        def open_session(trace: Any) -> None:
            # In the loop's thread: the session must be in its group before the first request, which comes at once.
            self._sessions.open(trace.id, group if trace.agent.trainable else "")
            minted[trace.id] = bool(trace.agent.trainable)

        rewards, failure = dict[str, float](), "it was cut"
        try:
            episode = await self._environment.run_episode(task, self._context, on_trace=open_session)
            rewards = {one.id: float(one.reward) for one in episode.traces if one.agent.trainable}
            failure = _failure(episode, rewards)
        finally:
            await asyncio.shield(asyncio.to_thread(self._end, minted, {} if failure else rewards))
        self.played += not failure
        return failure

    def _end(self, minted: Mapping[str, bool], rewards: Mapping[str, float]) -> None:
        for session, trainable in minted.items():
            if session in rewards:
                self._sessions.reward(session, rewards[session])
            else:
                with suppress(EbbtideError):  # it is dropped as abandoned otherwise
                    self._sessions.drop(session, FAILED if trainable else NOT_TRAINED)


def _failure(episode: Any, rewards: Mapping[str, float]) -> str:
    """Why an episode cannot be trained on; empty if it can."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return f"{errors[-1].type}: {errors[-1].message}"[:500] if errors else "it did not complete"
    if len(rewards) != 1:
        return f"it has {len(rewards)} traces to train on, and must have one"
    (reward,) = rewards.values()
    return "" if math.isfinite(reward) else f"its reward is {reward}"


def _endless_tasks(taskset: Any, seed: int) -> Iterator[Any]:
    """All tasks again and again, in another order each time; those of an endless taskset as they come."""
    if not taskset.bounded:
        yield from taskset
        return
    for epoch in count():
        tasks = list(taskset.shuffle(seed + epoch))
        if not tasks:
            raise InvalidRequest("the taskset has no tasks", field="environment.name")
        yield from tasks


async def train(source: Path, gateway: str, run_id: str | None, token_file: str | None) -> Run:
    """Submit the run of a TOML file and play it until it has ended. Raises `EbbtideError`."""
    spec = read_spec(source)
    config = environment_config(spec)
    try:
        import httpx
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.types import SamplingConfig
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        raise InvalidRequest(f"{error}: install verifiers==0.4.0 here", field="verifiers") from None
    security = client_security(token_file=token_file)
    os.environ[_KEY] = key = security.present_token()
    for name in _CREDENTIALS:
        os.environ.pop(name, None)
    try:
        environment = load_environment(resolve_env_config(config))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"verifiers cannot make it: {error}", field="environment") from error
    async with Client(security=security) as client, environment.serving():
        run = await client.submit(spec, run_id)
        sys.stderr.write(f"{run.run_id}: submitted\n")
        context = ModelContext(
            model=run.run_id,
            client=EvalClientConfig(base_url=f"{gateway.rstrip('/')}/v1", api_key_var=_KEY),
            sampling=SamplingConfig(**sampling_config(spec.sampling)),
        )
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=gateway, headers=headers, timeout=_PATIENCE_S) as http:
            player = EpisodePlayer(client, run, environment, context, GatewaySessions(http, run.run_id))
            ended = await player.play()
        sys.stderr.write(f"{ended.run_id}: {ended.status.name.lower()} after {player.played} episodes\n")
        return ended


def main(argv: Sequence[str] | None = None) -> int:
    """0 if the run has finished, 1 if it ended otherwise, 2 for what has to be corrected."""
    parser = argparse.ArgumentParser(prog="python -m ebbtide.verifiers", description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="TOML file of the run")
    parser.add_argument("--gateway", default=os.environ.get("EBBTIDE_GATEWAY", GATEWAY), help="URL of a gateway")
    parser.add_argument("--run-id", help="of the run; one that is there already is gone on with")
    parser.add_argument("--token-file", help="token of role user; default EBBTIDE_TOKEN_FILE or EBBTIDE_TOKEN")
    given = parser.parse_args(argv)
    try:
        ended = asyncio.run(train(given.run, given.gateway, given.run_id, given.token_file))
    except EbbtideError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0 if ended.status is RunStatus.FINISHED else 1


if __name__ == "__main__":
    sys.exit(main())
