"""Runs the verifiers of agents' sessions, each in a process of its own, and posts their verdicts."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from ebbtide import telemetry
from ebbtide.client import Lease
from ebbtide.driver.environment_host import BranchText, HostPlan, HostReply, LoadVerifier, VerifySession
from ebbtide.driver.environments import LOADING_S
from ebbtide.driver.host_process import HostEnded, HostProcess, IsolationRefused, TookTooLong
from ebbtide.driver.settings import DriverSettings
from ebbtide.environments.session_verifiers import checked_reward
from ebbtide.errors import InvalidRequest, NotFound
from ebbtide.rpc.backoff import pauses
from ebbtide.run_client import Conversations
from ebbtide.runtime import race
from ebbtide.types.rollout import DropReason, Trajectory
from ebbtide.types.session import UnverifiedSession
from ebbtide.types.tokens import unpack_ids, unpack_tokens


def branch_texts(session: UnverifiedSession, conversations: Conversations) -> list[BranchText]:
    """The texts of a session's branches, in the order of their last turns. Takes milliseconds for a long session."""
    ordered = sorted(session.trajectories, key=_number)
    return [BranchText(tuple(_passages(one, conversations)), one.truncated) for one in ordered]


def client_data(session: UnverifiedSession) -> bytes:
    """What the session's client gave with its end, as a JSON object."""
    return session.data or msgspec.json.encode({})


def _number(trajectory: Trajectory) -> tuple[int, str]:
    """Gateways number branches behind a dot."""
    number = trajectory.episode_id.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0, trajectory.episode_id


def _passages(trajectory: Trajectory, conversations: Conversations) -> Iterator[tuple[str, bool]]:
    """Texts in turn, and whether they were sampled."""
    yield conversations.raw_text(unpack_ids(trajectory.prompt_ids).tolist()), False
    tokens = unpack_tokens(trajectory.tokens)
    # Only sampled tokens have a version: a mask 0 may also be of one that another branch counts.
    sampled = tokens["version"] != 0
    ids = tokens["id"]
    for start, end in _runs(sampled):
        part: Sequence[int] = ids[start:end].tolist()
        if sampled[start]:
            yield conversations.text(part), True
        else:
            yield conversations.raw_text(part), False


def _runs(mask: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where equal values stand together."""
    if not len(mask):
        return
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    yield from pairwise(edges)


# Runs verifiers in processes that have none of the driver's rights, as they may crash, hang or be hostile.
#
# Invariant: a process serves one call at a time, and loads one verifier for its whole life. One that failed in any
# other way than by an exception is ended. All of them die with the driver; sessions without a verdict come again. A
# session is dropped for what happens during its call, never because the driver's host has no process for it: it waits
# for one.

#: Pauses between tries to start a process. A host that lacks memory or processes for a moment has them soon; one that
#: lacks them for long is not kept busy.
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 30.0
#: What a session's texts may take, so that they fit into a frame.
MOST_TEXT: Final = 12 << 20


class VerdictFailed(Exception):
    """No reward came of a session; `reason` is why it is dropped."""

    def __init__(self, text: str, reason: str = DropReason.VERIFIER_FAILED) -> None:
        super().__init__(text)
        self.reason = reason


class VerifierProcesses:
    """Runs a run's verifiers in at most `environment_threads` processes."""

    def __init__(self, verifiers: dict[str, str], settings: DriverSettings, plan: HostPlan) -> None:
        """`verifiers`: name -> `package.module:function`. `plan`: how processes are made."""
        self._verifiers, self._settings, self._plan = verifiers, settings, plan
        self._places = asyncio.Semaphore(settings.environment_threads)
        self._idle: defaultdict[str, list[HostProcess]] = defaultdict(list)

    async def load(self) -> None:
        """Start a process of each verifier. Raises `InvalidRequest` for one that cannot be loaded."""
        for name in self._verifiers:
            async with self._places:
                self._idle[name].append(await self._start(name))
                await self._shrink()

    async def reward(self, name: str, branches: list[BranchText], data: bytes, limit_s: float) -> float:
        """What a verifier gives a session. Raises `VerdictFailed`, also after `limit_s` seconds of its call. Waits
        while no process can be started.
        """
        if name not in self._verifiers:
            raise VerdictFailed(f"the run has no verifier {name!r}")
        if sum(len(text) for branch in branches for text, _ in branch.passages) > MOST_TEXT // 4:
            raise VerdictFailed(f"the session has more than {MOST_TEXT // 4} characters, the most that a verifier gets")
        session = VerifySession(tuple(branches), data)
        for pause_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            try:
                async with self._places:
                    return await self._judged(name, session, limit_s)
            except InvalidRequest as error:  # it could be loaded when the run began
                log.warning("a session waits for a process of its verifier", verifier=name, why=str(error))
            await asyncio.sleep(pause_s)
        raise AssertionError("pauses do not end")

    async def close(self) -> None:
        idle = [process for processes in self._idle.values() for process in processes]
        self._idle.clear()
        await asyncio.gather(*(process.end() for process in idle))

    async def _judged(self, name: str, session: VerifySession, limit_s: float) -> float:
        """Raises `VerdictFailed`, and `InvalidRequest` if no process can be started."""
        if self._idle[name]:
            # The host may have killed it while it was idle, so its end does not tell of this session.
            with contextlib.suppress(HostEnded):
                return await self._asked(name, self._idle[name].pop(), session, limit_s)
        process = await self._start(name)
        try:
            return await self._asked(name, process, session, limit_s)
        except HostEnded as error:
            raise VerdictFailed(str(error)) from None

    async def _asked(self, name: str, process: HostProcess, session: VerifySession, limit_s: float) -> float:
        try:
            reply = await process.call(session, timeout_s=limit_s)
        except TookTooLong:
            await process.end()
            raise VerdictFailed(f"it took more than {limit_s:g} s", DropReason.VERIFIER_TIMEOUT) from None
        return await self._told(name, process, reply)

    async def _told(self, name: str, process: HostProcess, reply: HostReply) -> float:
        if reply.exhausted:
            await process.end()
            raise VerdictFailed(f"{reply.error}: the verifier needs more than environments.memory_mib allows")
        self._idle[name].append(process)
        await self._shrink()
        if reply.error:
            raise VerdictFailed(reply.error)
        try:  # the process is not trusted
            return checked_reward(reply.reward)
        except (TypeError, ValueError) as error:
            raise VerdictFailed(f"it gave no reward: {error}") from None

    async def _start(self, name: str) -> HostProcess:
        field = f"environment.verifiers.{name}"
        try:
            process = await HostProcess.start(self._settings, self._plan)
        except IsolationRefused as error:
            text = f"has to run isolated, and the driver's host does not allow it ({error}); let it, or see "
            raise InvalidRequest(f"{text}environments.trust of the driver", field=field) from None
        except (HostEnded, TookTooLong, OSError) as error:
            raise InvalidRequest(f"no process could be started: {error}", field=field) from None
        try:
            reply = await process.call(LoadVerifier(self._verifiers[name]), timeout_s=LOADING_S)
        except (HostEnded, TookTooLong) as error:
            await process.end()
            raise InvalidRequest(f"cannot be loaded: {error or 'it takes too long'}", field=field) from None
        except BaseException:
            await process.end()
            raise
        if reply.error:
            await process.end()
            raise InvalidRequest(f"cannot be loaded: {reply.error}", field=field)
        return process

    async def _shrink(self) -> None:
        """Ends idle processes beyond as many as may work at once."""
        while sum(map(len, self._idle.values())) > self._settings.environment_threads:
            fullest = max(self._idle, key=lambda name: len(self._idle[name]))
            await self._idle[fullest].pop(0).end()


# Gives the sessions of a run that wait for their verdicts a reward, or drops them.
#
# Invariant: the coordinator keeps a session until its verdict is posted, and drops it after a time. So a driver that
# dies loses nothing: the next one reads all that wait again. A verdict that is posted twice counts once.

log = telemetry.get_logger(__name__)
#: Sessions that are verified or wait for a process here. Further ones stay at the coordinator: each may take megabytes.
_AT_ONCE: Final = 16
VERDICTS = telemetry.counter(
    "driver_verdicts_total", "sessions that verifiers judged: ok, or why they were dropped", ("outcome",)
)


class SessionVerdicts:
    """Verifies the sessions of one run."""

    def __init__(
        self, lease: Lease, processes: VerifierProcesses, conversations: Conversations, *, limit_s: float
    ) -> None:
        """`limit_s`: of one verifier's call."""
        self._lease, self._processes, self._conversations = lease, processes, conversations
        self._limit_s = limit_s

    async def run(self) -> None:
        """Verifies sessions as they end, until the lease is lost or this is cancelled."""
        waiting: asyncio.Queue[UnverifiedSession] = asyncio.Queue(1)
        await race(self._read(waiting), *(self._work(waiting) for _ in range(_AT_ONCE)))

    async def _read(self, waiting: "asyncio.Queue[UnverifiedSession]") -> None:
        async with aclosing(self._lease.unverified()) as sessions:
            async for session in sessions:
                await waiting.put(session)
        await self._lease.lost.wait()  # the run has ended, which others see to

    async def _work(self, waiting: "asyncio.Queue[UnverifiedSession]") -> None:
        while True:
            await self._judge(await waiting.get())

    async def _judge(self, session: UnverifiedSession) -> None:
        try:
            branches = await asyncio.to_thread(branch_texts, session, self._conversations)
            data = client_data(session)
            reward = await self._processes.reward(session.verifier, branches, data, self._limit_s)
        except VerdictFailed as error:
            VERDICTS.labels(error.reason).inc()
            log.warning("a verifier failed", session_id=session.session_id, verifier=session.verifier, why=str(error))
            await self._post(session, drop_reason=error.reason)
        else:
            VERDICTS.labels("ok").inc()
            await self._post(session, reward=reward)

    async def _post(self, session: UnverifiedSession, *, reward: float | None = None, drop_reason: str = "") -> None:
        try:
            await self._lease.post_verdict(session.session_id, reward=reward, drop_reason=drop_reason)
        except NotFound:
            log.info("the session was forgotten before its verdict", session_id=session.session_id)
