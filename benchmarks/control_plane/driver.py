"""The driver's side: keeps so many rollouts open, and acknowledges what is finished."""

import asyncio
import random
import time
from collections import defaultdict
from typing import Any, Final

from benchmarks.control_plane.responses import LONGEST, response
from ebbtide.auth.security import ClientSecurity
from ebbtide.client.service_peer import ServicePeer
from ebbtide.types.run import EnvironmentSpec, RunSpec, ShareSpec, TailSpec
from ebbtide.types.tokens import pack_ids, unpack_tokens
from ebbtide.v1 import rollouts_pb2, runs_pb2, types_pb2
from ebbtide.v1.rollouts_pb2_grpc import RolloutsStub
from ebbtide.v1.runs_pb2_grpc import RunsStub
from ebbtide.wire import to_proto

RUN: Final = "load"
#: Tokens of a response, drawn evenly: about as long in the mean as those of DeepSeek-R1 when it serves. Of the first
#: ones it is drawn what is left, so that finishes are spread; `spared` tokens more, so that for a while none ends.
LENGTHS: Final = (512, 2560)
#: Least tokens that the first ones have left, unless responses are shorter.
_REST: Final = 64
#: Rollouts of a group.
GROUP: Final = 8
_PROMPT: Final = pack_ids(range(2, 66))
_BATCH_S: Final = 0.02
_PER_CALL: Final = 512
#: How long a coordinator may be away.
_PATIENCE_S: Final = 60.0
_SAMPLING: Final = types_pb2.Sampling


class Driver:
    """`open` rollouts are kept queued or running. A rollout's id ends with its time of submission, microseconds."""

    def __init__(
        self,
        address: str,
        token: str,
        *,
        spared: int = 0,
        run_id: str = RUN,
        lengths: tuple[int, int] = LENGTHS,
        share: ShareSpec | None = None,
        tail: TailSpec | None = None,
    ) -> None:
        """`address`: of coordinators several, with commas between them. `share`: of the fleet, beside other runs."""
        self.run_id, self._lengths, self._share = run_id, lengths, share or ShareSpec()
        self._tail = tail or TailSpec()
        self._spared = min(spared, LONGEST - self._lengths[1])
        self._peer = ServicePeer("coordinator", address, ClientSecurity(token=token), _PATIENCE_S)
        self._runs: Any = RunsStub(self._peer.channel)
        self._rollouts: Any = RolloutsStub(self._peer.channel)
        self._lease = runs_pb2.LeaseRef()
        self._random = random.Random(3)
        self.groups: list[str] = []  # in the order in which they ended
        self._count = 0
        self._over: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._want = asyncio.Event()
        self.open = self._live = 0
        self.submitted = (0.0, 0.0)  # when the last submission began, and when it was acknowledged
        self._left: defaultdict[str, int] = defaultdict(lambda: GROUP)
        self.unfinished: dict[str, int] = {}  # rollout -> its length
        self.finished = self.lost_tokens = self.doubled_tokens = 0
        self.lost: dict[str, float] = {}  # worker -> when its loss became known here

    async def start(self) -> None:
        spec = RunSpec(
            name="load",
            model="scripted",
            environment=EnvironmentSpec(name="none"),
            quota_bytes=4 << 30,
            share=self._share,
            tail=self._tail,
        )
        message = to_proto(spec, types_pb2.RunSpec)
        call = self._peer.call
        await call(self._runs.SubmitRun, runs_pb2.SubmitRunRequest(run_id=self.run_id, spec=message))
        claim = runs_pb2.ClaimRunRequest(run_id=self.run_id, role="trainer", holder="driver")
        self._lease = (await call(self._runs.ClaimRun, claim)).ref
        number = (await call(self._runs.ReserveVersion, self._lease)).version
        version = types_pb2.PolicyVersion(policy="policy", version=number, root=bytes([number]) * 32)
        await call(self._runs.AnnounceVersion, runs_pb2.AnnounceVersionRequest(lease=self._lease, version=version))
        works = (self._keep_open(), self._take_finished(), self._acknowledge(), self._watch(), self._renew())
        self._tasks = [asyncio.create_task(work) for work in works]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._peer.close()

    def check(self) -> None:
        """Raise what ended any of the driver's tasks."""
        for task in self._tasks:
            if task.done():
                task.result()

    def want(self, rollouts: int) -> None:
        self.open = rollouts
        self._want.set()

    async def _keep_open(self) -> None:
        begin = True
        while True:
            await self._want.wait()
            self._want.clear()
            while (missing := min(_PER_CALL, self.open - self._live)) > 0:
                batch = [self._request(begin) for _ in range(missing)]
                self._live += missing
                began = time.monotonic()
                request = rollouts_pb2.SubmitRequest(lease=self._lease, rollouts=batch)
                await self._peer.call(self._rollouts.Submit, request)
                self.submitted = (began, time.monotonic())
            begin = False
            await asyncio.sleep(_BATCH_S)  # so that a call has several, as a driver's has groups

    def _request(self, begin: bool) -> rollouts_pb2.RolloutRequest:
        self._count += 1
        length = self._random.randint(*self._lengths)
        if begin:
            length = self._spared + self._random.randint(min(_REST, self._lengths[0]), length)
        name = f"x{self._count}"
        rollout_id = f"{name}.{round(time.monotonic() * 1e6)}"
        self.unfinished[rollout_id] = length
        return rollouts_pb2.RolloutRequest(
            rollout_id=rollout_id,
            group_id=f"g{(self._count - 1) // GROUP}",
            episode_id=name,
            prompt_ids=_PROMPT,
            sampling=_SAMPLING(max_tokens=length, temperature=1.0, top_p=1.0, repetition_penalty=1.0),
            kind=types_pb2.ROLLOUT_KIND_TRAIN,
        )

    async def _take_finished(self) -> None:
        request = rollouts_pb2.WatchFinishedRequest(run_id=self.run_id, grouped=True)
        async for message in self._peer.follow(lambda: self._rollouts.WatchFinished(request)):
            for rollout in (message, *message.others):
                request.cursor = rollout.cursor
                self._take(rollout)

    def _take(self, rollout: rollouts_pb2.FinishedRollout) -> None:
        if rollout.rollout_id not in self.unfinished:
            return  # seen before the stream broke
        self._check(rollout)
        self._over.append(rollout.rollout_id)
        self._ended(rollout.group_id)
        self._live -= 1
        self._want.set()

    def _ended(self, group_id: str) -> None:
        self._left[group_id] -= 1
        if not self._left[group_id]:
            del self._left[group_id]
            self.groups.append(group_id)

    def _check(self, rollout: rollouts_pb2.FinishedRollout) -> None:
        """A response is its length's first tokens, each once: nothing acknowledged was lost or stored twice."""
        self.finished += 1
        length = self.unfinished.pop(rollout.rollout_id)
        if rollout.tokens != response(0, length):
            had = unpack_tokens(rollout.tokens)
            self.doubled_tokens += max(0, len(had) - length)
            self.lost_tokens += max(1 if len(had) == length else 0, length - len(had))

    async def _acknowledge(self) -> None:
        while True:
            await asyncio.sleep(_BATCH_S)
            if over := self._over:
                self._over = []
                await self._end(over)

    async def _end(self, rollout_ids: list[str]) -> None:
        """Have finished rollouts counted as trained, and deleted."""
        for at in range(0, len(rollout_ids), _PER_CALL):
            part = rollout_ids[at : at + _PER_CALL]
            request = rollouts_pb2.AcknowledgeRequest(lease=self._lease, rollout_ids=part)
            await self._peer.call(self._rollouts.Acknowledge, request)

    async def _watch(self) -> None:
        request = runs_pb2.WatchRunRequest(run_id=self.run_id)
        async for event in self._peer.follow(lambda: self._runs.WatchRun(request)):
            request.cursor = event.cursor
            if event.kind == "worker" and event.labels["state"] in {"lost", "suspected"}:
                self.lost.setdefault(event.labels["worker"], time.monotonic())

    async def stored(self) -> int:
        """Tokens of the run that are stored."""
        run = await self._peer.call(self._runs.GetRun, runs_pb2.GetRunRequest(run_id=self.run_id))
        return int(run.counters["tokens_stored"])

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(2.0)
            await self._peer.call(self._runs.RenewLease, self._lease)
