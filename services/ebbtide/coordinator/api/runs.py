"""Serves `ebbtide.v1.Runs`: runs, their leases, versions and events."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and hands each a context

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Final, TypeAlias

import grpc
import msgspec
from msgspec import Struct

from ebbtide import telemetry
from ebbtide.auth.admission import caller_name, check_claim
from ebbtide.coordinator.api.calls import (
    CoordinatorParts,
    ListPage,
    check_batch,
    check_cursor,
    check_lease,
    check_number,
    paced,
    records_from_proto,
)
from ebbtide.coordinator.api.remaining_work import RemainingWorkReader, run_outlook
from ebbtide.coordinator.attempt_transitions import changing
from ebbtide.coordinator.rules.fair_share import check_floor
from ebbtide.coordinator.rules.move_costs import MoveLedger
from ebbtide.coordinator.state.coordinator_state import CoordinatorState, StoreIncarnation
from ebbtide.coordinator.state.notifier import follow
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.errors import InvalidRequest, LeaseSuperseded, NoCapacity, NotFound, NotReady
from ebbtide.hub_models import model_name
from ebbtide.rpc.fair_limiter import stream_turn
from ebbtide.rpc.run_endings import EndedRun, RunsEnded, check_held
from ebbtide.store.records import UNEXPECTED
from ebbtide.store.store import Store
from ebbtide.types.fleet import WorkerKind
from ebbtide.types.ids import MAX_EVENT_BYTES, check_id, shortened
from ebbtide.types.rollout import DropReason
from ebbtide.types.run import (
    GATEWAY,
    ROLES,
    AttemptSpan,
    LeaseRef,
    Run,
    RunEvent,
    RunMoves,
    RunShare,
    RunSpec,
    RunStatus,
    check_spec,
)
from ebbtide.types.weights import DIGEST_BYTES, PolicyVersion
from ebbtide.v1 import runs_pb2, runs_pb2_grpc, types_pb2
from ebbtide.wire import from_proto, to_proto


class ClaimableRun(Struct, frozen=True, kw_only=True):
    """A live run as one role sees it."""

    run_id: str
    holder: str = ""  # of the role; "": it is free
    renewed_s: float = 0.0  # since the holder renewed its lease
    paired: bool = False  # the other role is held


def choose(runs: Iterable[ClaimableRun], *, role: str, holder: str, waited_s: float) -> str:
    """The id of `holder`'s run, of `runs`, oldest first: its own; else one that lacks only this role; else any that
    lacks it, if the holders of all older ones renewed within the `waited_s` for which the caller has asked. Raises
    `NotReady`.

    A run continues only while both its roles are held. So a process that restarts under another name must return to the
    run whose other role still waits for it, and not begin a younger one while its former lease runs out.
    """
    known = list(runs)
    for run in known:
        if run.holder == holder:
            return run.run_id
    for run in known:
        if run.paired and not run.holder:
            return run.run_id
    for run in known:
        if not run.holder:
            return run.run_id
        if run.renewed_s > waited_s:
            raise NotReady(
                f"{run.holder} may have left run {run.run_id} without a {role}; that is seen to first, ask again"
            )
    raise NotReady(f"no run wants a {role}; submit one, or wait")


log = telemetry.get_logger(__name__)
#: Runs that are read together for a list.
_LIST_AT_ONCE: Final = 64


#: A released worker hands over within so long: its machine is paid for meanwhile.
_RELEASE_S: Final = 60.0


class RunService:
    """All methods raise `StoreUnavailable`, and `NotFound` for a run that does not exist."""

    def __init__(self, parts: CoordinatorParts) -> None:
        self._settings, self._state, self._store, self._notifier = (
            parts.settings,
            parts.state,
            parts.store,
            parts.notifier,
        )
        self._fleet, self._attempts, self._recovery = parts.fleet, parts.attempts, parts.recovery
        self._publishers, self._writes = parts.publishers, parts.writes
        self._promising = asyncio.Lock()
        self._quota = RunQuota(parts.state, parts.store, limit=parts.settings.max_runs_per_user)

    @property
    def incarnation(self) -> StoreIncarnation:
        return self._state.incarnation

    def durability_lag_s(self) -> float:
        """What was acknowledged so many seconds ago is durable."""
        return self._store.link.durability.lag_s()

    async def submit(self, run_id: str, spec: RunSpec, submitter: str = "") -> Run:
        """Create a run, once per id. Raises `NotReady` if its floor cannot be promised, and `NoCapacity` if the
        submitter has too many live runs.
        """
        check_id(run_id, field="run_id")
        check_spec(spec)
        # Callers without a name may be many users: only repeats of one of their runs wait for each other.
        kind, name = ("submit of user", submitter) if submitter else ("submit of run", run_id)
        lock = self._writes.lock(kind, name)
        run, made, incarnation = await self._writes.carry_out(lock, lambda: self._submit(run_id, spec, submitter))
        await self._store.link.durable(incarnation)
        if made:
            log.info("run submitted", run_id=run_id, model=spec.model)
            await self._hint(run)
        return run

    async def _submit(self, run_id: str, spec: RunSpec, submitter: str) -> tuple[Run, bool, str]:
        """The run, whether it is new, and the incarnation of the store that has it."""
        incarnation = self._store.link.incarnation
        await self._publishers.keep()
        with self._quota.submitting(run_id, submitter):
            await self._quota.check(run_id, submitter)
            if spec.share.floor:
                async with self._promising:  # no other floor is promised between the check and the submit
                    await self._check_floor(run_id, spec)
                    made = await self._store.runs.submit(run_id, spec, submitter)
            else:
                made = await self._store.runs.submit(run_id, spec, submitter)
            run = await self._store.runs.read(run_id)
            if not run.status.ended:
                await self._recovery.add(run)
            return run, made, incarnation

    async def _check_floor(self, run_id: str, spec: RunSpec) -> None:
        runs = [run async for _, run in self.list()]
        if all(run.run_id != run_id for run in runs):
            floors = {run.run_id: run.spec.share.floor for run in runs if not run.status.ended}
            check_floor(run_id, spec.share.floor, floors)

    async def _hint(self, run: Run) -> None:
        """Warn of a fleet that seems to serve another model; only an install shows it for certain."""
        models = {worker.engine.model for worker in self._fleet.workers() if worker.engine}
        if models and models.isdisjoint({run.spec.model, model_name(run.spec.model)}):  # workers name no paths
            text = f"no attached worker names the model {run.spec.model}; attached: {', '.join(sorted(models))}"
            await self._store.events.note(run.run_id, RunEvent(kind="warning", key="model", message=text))
            self._notifier.notify("events", run.run_id)

    async def get(self, run_id: str) -> Run:
        """The run as stored. A run that ended by a call whose answer was lost leaves the mirror here."""
        run = await self._store.runs.read(check_id(run_id, field="run_id"))
        if run.status.ended:
            await self._attempts.run_over(run_id, run.status)
        live = None if run.status.ended else self._state.runs.get(run.run_id)
        outlook = run_outlook(live, self._state.sessions.values()) if live else None
        message = run.message or self._waits_for(run)
        moves = _moves(live.moves) if live else None
        return msgspec.structs.replace(run, message=message, share=self._share(run), outlook=outlook, moves=moves)

    def _share(self, run: Run) -> RunShare | None:
        live = None if run.status.ended else self._state.runs.get(run.run_id)
        return live.share if live else None

    def _waits_for(self, run: Run) -> str:
        """What a live run waits for, "" for nothing."""
        if run.status.ended:
            return ""
        if run.newest is None:
            return "waits for its first policy version"
        return self._fleet.trust.lacking(self._state.clock())

    async def list(self, cursor: str = "", *, newest_first: bool = False) -> AsyncGenerator[tuple[str, Run], None]:
        """Runs with a record beyond `cursor`, each with its own cursor, oldest first by default. Those with an expired
        record leave the list. Runs with broken data, and ended ones that another release wrote and this one cannot
        read, are left out.
        """
        place = check_number(cursor, math.inf if newest_first else -math.inf)
        while found := await self._store.runs.listed(place, _LIST_AT_ONCE, newest_first=newest_first):
            runs = await asyncio.gather(*(self._listed(run_id) for _, run_id in found))
            for (place, _), run in zip(found, runs, strict=True):
                if run is not None:
                    yield str(place), run

    async def _listed(self, run_id: str) -> Run | None:
        try:
            run = await self._store.runs.read(run_id)
            return msgspec.structs.replace(run, share=self._share(run))
        except NotFound:
            if run_id not in self._state.skipped:
                await self._store.runs.forget(run_id)
        except (NotReady, *UNEXPECTED) as error:
            log.warning("run not listed", run_id=run_id, reason=str(error))
        return None

    async def cancel(self, run_id: str) -> Run:
        check_id(run_id, field="run_id")
        await self._attempts.end_run(run_id, RunStatus.CANCELLED, "cancelled", drop=DropReason.CANCELLED)
        return await self.get(run_id)

    async def finish(self, lease: LeaseRef, wanted: int, message: str) -> Run:
        """End a run as FINISHED (all training rollouts accounted for) or FAILED."""
        if wanted not in {RunStatus.FINISHED, RunStatus.FAILED}:
            raise InvalidRequest("must be FINISHED or FAILED", field="status")
        status = RunStatus(wanted)
        run = await self.get(check_lease(lease).run_id)
        if run.status.ended:
            if run.status is not status:
                raise LeaseSuperseded(f"run {run.run_id} has ended ({run.status.name.lower()}); step down")
            return run
        await self._attempts.end_run(lease.run_id, status, message, drop=DropReason.RUN_ENDED, lease=lease)
        return await self.get(lease.run_id)

    async def watch(self, run_id: str, cursor: str) -> AsyncIterator[RunEvent]:
        """Events after `cursor` until the run has ended."""
        await self.get(run_id)
        async for event in follow(
            self._notifier,
            ("events", run_id),
            lambda last: self._store.events.page(run_id, last),
            cursor,
            lambda: run_id not in self._state.runs,
        ):
            yield event

    async def watch_ended(self, held: Sequence[str]) -> AsyncIterator[RunsEnded]:
        """The ended ones of the runs that the caller holds data of, then each run that ends, for ever."""
        check_held(tuple(held))
        with self._state.endings.listening() as endings:
            # The live runs are read first: the listener reports those that end meanwhile.
            live, life = (*self._state.runs, *self._state.skipped), self._state.incarnation.name
            ended = [run for run_id in held if (run := await self._ended(run_id)) is not None]
            yield RunsEnded(ended=tuple(ended), live=live, store_life=life)
            while True:
                yield RunsEnded(ended=(await endings.get(),))

    async def _ended(self, run_id: str) -> EndedRun | None:
        """The run's end, if it is known to have ended."""
        if run_id in self._state.runs:
            return None
        try:
            status = (await self._store.runs.read(run_id)).status
        except (NotFound, NotReady, *UNEXPECTED):
            return None
        return EndedRun(run_id, status) if status.ended else None

    async def timeline(self, run_id: str, cursor: str, *, requests: bool = False) -> AsyncIterator[AttemptSpan]:
        """The attempts that have ended, after `cursor`, oldest first: those at requests, or all others."""
        await self._store.runs.read(check_id(run_id, field="run_id"))
        while True:
            async with stream_turn():
                spans = await self._store.spans.page(run_id, cursor, requests=requests)
            if not spans:
                return
            for span in spans:
                yield span
            cursor = spans[-1].cursor

    async def claim(self, run_id: str, role: str, holder: str, waited_s: float) -> tuple[LeaseRef, Run]:
        """Claim the role's lease on the run; without an id, on a run that `run_claims.choose` finds among those that
        are not external. Raises `NotReady` if it is held, or there is none, `NoCapacity` if the run has too many
        gateways.
        """
        if role not in {*ROLES, GATEWAY}:
            raise InvalidRequest(f"must be one of {', '.join(ROLES)}, {GATEWAY}", field="role")
        check_id(holder, field="holder")
        if role == GATEWAY and not run_id:
            raise InvalidRequest(f"is required: a {GATEWAY} names the run that it serves", field="run_id")
        if run_id:
            await self._recovery.live(check_id(run_id, field="run_id"))
            lease = await self._store.leases.claim(run_id, role, holder, self._settings.lease_ttl_s)
        else:
            lease = await self._claim_any(role, holder, waited_s)
            run_id = lease.run_id
        log.info("claimed", run_id=run_id, role=role, holder=holder)
        self._notifier.notify("events", run_id)
        return lease, await self.get(run_id)

    async def _claim_any(self, role: str, holder: str, waited_s: float) -> LeaseRef:
        broken = set[RunState]()
        while True:
            anybodys = [run for run in self._state.runs.values() if not run.spec.external and run not in broken]
            found = await asyncio.gather(*(self._claimable(run, role) for run in anybodys))
            claimable = [one for one in found if one is not None]
            run_id = choose(claimable, role=role, holder=holder, waited_s=waited_s)
            chosen = next(run for run in anybodys if run.run_id == run_id)
            try:
                return await self._store.leases.claim(run_id, role, holder, self._settings.lease_ttl_s)
            except (LeaseSuperseded, NotFound):  # over in the store, but not in the mirror yet
                await self._attempts.run_over(run_id)
            except UNEXPECTED as error:
                chosen.mirror.pause(error)
                broken.add(chosen)

    async def _claimable(self, run: RunState, role: str) -> ClaimableRun | None:
        """The run as one role sees it; None if its data is broken."""
        run_id = run.run_id
        try:
            held = await self._store.leases.held(run_id)
        except UNEXPECTED as error:
            run.mirror.pause(error)
            return None
        mine = held.pop(role, None)
        if mine is None:
            return ClaimableRun(run_id=run_id, paired=bool(held))
        renewed_s = self._settings.lease_ttl_s - mine.rest_s
        return ClaimableRun(run_id=run_id, holder=mine.holder, renewed_s=renewed_s, paired=bool(held))

    async def renew(self, lease: LeaseRef) -> Run:
        await self._store.leases.renew(check_lease(lease, gateways=True), self._settings.lease_ttl_s)
        return await self.get(lease.run_id)

    async def release_worker(self, lease: LeaseRef, worker_id: str) -> None:
        """Ask a spot worker of the run to hand over and leave. Raises `NotReady` if the run may not have it leave, and
        `NotFound`.
        """
        await self._store.leases.renew(check_lease(lease, role="trainer"), self._settings.lease_ttl_s)
        run = await self._recovery.live(lease.run_id)
        found = [one for one in self._state.serving(run.run_id) if one.worker_id == worker_id]
        if not found:
            raise NotFound(f"no worker {worker_id} serves run {run.run_id}")
        if not run.spec.trainer.releases:
            raise NotReady("the run keeps its workers: set trainer.releases to have some leave")
        if found[0].hello.kind is not WorkerKind.SPOT:
            raise NotReady(f"worker {worker_id} is no spot worker")
        if len(self._state.runs) > 1:
            raise NotReady("other runs are live, which may need the worker")
        self._fleet.drain(worker_id, _RELEASE_S)
        log.info("worker released", run_id=run.run_id, worker_id=worker_id)

    async def release(self, lease: LeaseRef) -> None:
        try:
            await self._store.leases.release(check_lease(lease, gateways=True))
        except LeaseSuperseded:  # the run has ended: there is nothing to release
            return

    async def reserve_version(self, lease: LeaseRef) -> tuple[int, bytes]:
        """The next version's number, and the seed of the key to sign it with."""
        seed = await self._publishers.seed(check_lease(lease, role="trainer").run_id)
        return await self._store.runs.reserve_version(lease), seed

    async def announce(self, lease: LeaseRef, version: PolicyVersion) -> None:
        """Make a version the newest, so that workers install it."""
        check_lease(lease, role="trainer")
        run = await self._recovery.live(lease.run_id)
        if version.version < 1:
            raise InvalidRequest("versions start at 1: reserve one", field="version.version")
        if version.policy != run.spec.policy:
            raise InvalidRequest(f"the run trains {run.spec.policy}, not {version.policy}", field="version.policy")
        if len(version.root) not in {0, DIGEST_BYTES}:
            raise InvalidRequest(f"must be {DIGEST_BYTES} bytes", field="version.root")
        await self._recovery.refresh(run)  # else its event may get a number that a store that came back gave before
        await self._writes.carry_out(changing(run), lambda: self._announce(run, lease, version))

    async def _announce(self, run: RunState, lease: LeaseRef, version: PolicyVersion) -> None:
        await self._store.runs.announce(lease, version)
        run.versions.announce(version)
        self._notifier.notify("events", run.run_id)
        log.info("version", run_id=run.run_id, version=version.version, step=version.step)

    async def report(self, lease: LeaseRef, events: Sequence[RunEvent]) -> None:
        check_lease(lease)
        check_batch(events, field="events")
        for index, event in enumerate(events):
            check_id(event.kind, field=f"events[{index}].kind")
        run = await self._recovery.live(lease.run_id)
        await self._recovery.refresh(run)  # as `announce`
        try:
            async for page in paced(events):
                await self._store.events.report(lease, page, quota_bytes=run.spec.quota_bytes)
        finally:  # former pages are stored
            self._notifier.notify("events", lease.run_id)


def _moves(ledger: MoveLedger) -> RunMoves:
    return RunMoves(
        moves=ledger.moves,
        finished=ledger.finished,
        judged=ledger.judged,
        promised_tokens=ledger.promised_tokens,
        made_tokens=ledger.made_tokens,
        stopped=not ledger.trusted,
    )


Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

SERVICE = "ebbtide.v1.Runs"


class RunsServicer(runs_pb2_grpc.RunsServicer):
    def __init__(self, runs: RunService, work: RemainingWorkReader, *, lease_ttl_s: float) -> None:
        self._runs, self._work, self._ttl_s = runs, work, lease_ttl_s

    async def SubmitRun(self, request: runs_pb2.SubmitRunRequest, context: Context) -> runs_pb2.Run:
        spec = from_proto(request.spec, RunSpec, field="spec")
        return to_proto(await self._runs.submit(request.run_id, spec, caller_name()), runs_pb2.Run)

    async def GetRun(self, request: runs_pb2.GetRunRequest, context: Context) -> runs_pb2.Run:
        return to_proto(await self._runs.get(request.run_id), runs_pb2.Run)

    async def ListRuns(self, request: runs_pb2.ListRunsRequest, context: Context) -> runs_pb2.ListRunsResponse:
        page = ListPage(runs_pb2.Run, request.page_size)
        async with aclosing(self._runs.list(request.cursor, newest_first=not request.page_size)) as runs:
            async for cursor, run in runs:
                if not page.add(cursor, run):
                    break
        if request.page_size:
            return runs_pb2.ListRunsResponse(runs=page.messages, next=page.next)
        return runs_pb2.ListRunsResponse(runs=page.messages[::-1])

    async def CancelRun(self, request: runs_pb2.CancelRunRequest, context: Context) -> runs_pb2.Run:
        return to_proto(await self._runs.cancel(request.run_id), runs_pb2.Run)

    async def WatchRun(self, request: runs_pb2.WatchRunRequest, context: Context) -> AsyncIterator[runs_pb2.RunEvent]:
        async for event in self._runs.watch(request.run_id, check_cursor(request.cursor)):
            yield to_proto(event, runs_pb2.RunEvent)

    async def ReadTimeline(
        self, request: runs_pb2.ReadTimelineRequest, context: Context
    ) -> AsyncIterator[runs_pb2.AttemptSpan]:
        cursor = check_cursor(request.cursor)
        async for span in self._runs.timeline(request.run_id, cursor, requests=request.requests):
            yield to_proto(span, runs_pb2.AttemptSpan)

    async def ClaimRun(self, request: runs_pb2.ClaimRunRequest, context: Context) -> runs_pb2.Lease:
        check_claim(request.role)
        waited_s = request.waited_s if request.HasField("waited_s") else math.inf
        lease, run = await self._runs.claim(request.run_id, request.role, request.holder, waited_s)
        return self._lease(to_proto(lease, runs_pb2.LeaseRef), run)

    async def RenewLease(self, request: runs_pb2.LeaseRef, context: Context) -> runs_pb2.Lease:
        run = await self._runs.renew(from_proto(request, LeaseRef))
        return self._lease(request, run)

    def _lease(self, ref: runs_pb2.LeaseRef, run: Run) -> runs_pb2.Lease:
        incarnation = self._runs.incarnation
        return runs_pb2.Lease(
            ref=ref,
            ttl_s=self._ttl_s,
            run=to_proto(run, runs_pb2.Run),
            store_life=incarnation.name,
            durable_after_s=self._runs.durability_lag_s(),
        )

    async def ReleaseLease(self, request: runs_pb2.LeaseRef, context: Context) -> runs_pb2.Empty:
        await self._runs.release(from_proto(request, LeaseRef))
        return runs_pb2.Empty()

    async def ReserveVersion(self, request: runs_pb2.LeaseRef, context: Context) -> runs_pb2.ReserveVersionResponse:
        version, seed = await self._runs.reserve_version(from_proto(request, LeaseRef))
        return runs_pb2.ReserveVersionResponse(version=version, publisher_seed=seed)

    async def AnnounceVersion(self, request: runs_pb2.AnnounceVersionRequest, context: Context) -> runs_pb2.Empty:
        lease = from_proto(request.lease, LeaseRef, field="lease")
        await self._runs.announce(lease, from_proto(request.version, PolicyVersion, field="version"))
        return runs_pb2.Empty()

    async def ReadWorkLeft(
        self, request: runs_pb2.ReadRemainingWorkRequest, context: Context
    ) -> runs_pb2.RemainingWork:
        lease = check_lease(from_proto(request.lease, LeaseRef, field="lease"), role="trainer")
        found = await self._work.read(lease.run_id, groups=request.groups, fleet=request.fleet, wait_s=request.wait_s)
        return to_proto(found, runs_pb2.RemainingWork)

    async def ReleaseWorker(self, request: runs_pb2.ReleaseWorkerRequest, context: Context) -> runs_pb2.Empty:
        lease = from_proto(request.lease, LeaseRef, field="lease")
        await self._runs.release_worker(lease, check_id(request.worker_id, field="worker_id"))
        return runs_pb2.Empty()

    async def Report(self, request: runs_pb2.ReportRequest, context: Context) -> runs_pb2.Empty:
        for index, event in enumerate(request.events):
            if event.ByteSize() > MAX_EVENT_BYTES:
                raise InvalidRequest(f"more than {MAX_EVENT_BYTES} bytes", field=f"events[{index}]")
        events = await records_from_proto(request.events, RunEvent, field="events")
        await self._runs.report(from_proto(request.lease, LeaseRef, field="lease"), events)
        return runs_pb2.Empty()

    async def WatchEnded(
        self, request: types_pb2.WatchEndedRequest, context: Context
    ) -> AsyncIterator[types_pb2.RunsEnded]:
        async for ended in self._runs.watch_ended(request.held):
            yield to_proto(ended, types_pb2.RunsEnded)

    async def FinishRun(self, request: runs_pb2.FinishRunRequest, context: Context) -> runs_pb2.Run:
        lease = from_proto(request.lease, LeaseRef, field="lease")
        status = request.status or RunStatus.FINISHED
        return to_proto(await self._runs.finish(lease, status, shortened(request.message)), runs_pb2.Run)


#: Runs end seldom.
_RETRY_AFTER_S: Final = 30.0


class RunQuota:
    """Bounds the live runs of each user, by the name in the token that submitted them.

    Invariant: runs that are being submitted count, so calls at the same time do not pass the limit together. What is
    remembered here can be read from the store again.
    """

    def __init__(self, state: CoordinatorState, store: Store, *, limit: int) -> None:
        self._state, self._store, self._limit = state, store, limit
        self._submitters: dict[str, str | None] = {}  # of live runs; None: not known, asked again
        self._submitting = Counter[tuple[str, str]]()  # (run, submitter) of calls that have not ended

    @contextmanager
    def submitting(self, run_id: str, submitter: str) -> Iterator[None]:
        """Count a run while it is submitted."""
        self._submitting[run_id, submitter] += 1
        try:
            yield
        finally:
            self._submitting -= Counter([(run_id, submitter)])

    async def check(self, run_id: str, submitter: str) -> None:
        """Raise `NoCapacity` if the submitter has as many live runs as it may have. A run that exists is no new one."""
        if run_id in self._state.runs:
            return
        await self._learn()
        counted = {name for name in self._state.runs if self._submitters.get(name) == submitter}
        counted |= {name for name, other in self._submitting if other == submitter}
        if len(counted - {run_id}) < self._limit or await self._exists(run_id):
            return
        who = f"user {submitter} has" if submitter else "callers whose tokens have no name have"
        raise NoCapacity(
            f"{who} {self._limit} live runs, as many as max_runs_per_user of the coordinator allows; end one "
            "(ebbtide run list, ebbtide run cancel), or ask an operator to raise it",
            retry_after_s=_RETRY_AFTER_S,
        )

    async def _learn(self) -> None:
        """Read who submitted the live runs that are not known here: those of a former coordinator."""
        known = {name: who for name, who in self._submitters.items() if who is not None}
        self._submitters = {name: who for name, who in known.items() if name in self._state.runs}
        while unknown := self._state.runs.keys() - self._submitters.keys():  # others may come meanwhile
            for name in unknown:
                self._submitters[name] = None
                with suppress(NotFound, NotReady, *UNEXPECTED):  # gone, of a later release, or broken
                    self._submitters[name] = (await self._store.runs.read(name)).submitter

    async def _exists(self, run_id: str) -> bool:
        try:
            await self._store.runs.read(run_id)
        except NotFound:
            return False
        except (NotReady, *UNEXPECTED):
            return True
        return True
