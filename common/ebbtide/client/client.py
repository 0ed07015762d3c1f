"""Calls one coordinator and one relay for everything that needs no lease, and claims leases."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from ebbtide.auth.security import ClientSecurity
from ebbtide.client.held_lease import LEAVE_S
from ebbtide.client.lease import GatewayLease, Lease
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import NoCapacity, NotFound, NotReady
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import DURABLE_TIMEOUT_S, check_address
from ebbtide.types.fleet import Worker
from ebbtide.types.ids import new_fence, new_run_id
from ebbtide.types.parse import parse
from ebbtide.types.rollout import TokenChunk, Trajectory
from ebbtide.types.run import GATEWAY, AttemptSpan, Run, RunEvent, RunSpec, check_spec
from ebbtide.types.session import KeyUsage
from ebbtide.types.spec_file import SpecFile
from ebbtide.types.weights import Box, Manifest, VersionInfo, WeightsState
from ebbtide.v1 import fleet_pb2, rollouts_pb2, runs_pb2, types_pb2
from ebbtide.v1.fleet_pb2_grpc import FleetStub
from ebbtide.v1.rollouts_pb2_grpc import RolloutsStub
from ebbtide.v1.runs_pb2_grpc import RunsStub
from ebbtide.wire import from_proto, to_proto

if TYPE_CHECKING:
    from ebbtide.client.publisher.publisher import Publisher
    from ebbtide.client.publisher.rank_exchange import RankExchange
    from ebbtide.client.relay_client import RelayClient
    from ebbtide.weights import NamedTensor

Role = Literal["trainer", "driver"]
COORDINATOR = "127.0.0.1:7600"
RELAY = "127.0.0.1:7610"
#: Entries per page of a list.
_PAGE = 500
#: Of a host's name, so that a holder's name is an id.
_HOST_CHARACTERS = 64


class Client:
    """An async context manager. `coordinator` is an address, or several with commas between them if the leader has
    standbys. Unset arguments come from EBBTIDE_COORDINATOR, EBBTIDE_RELAY, EBBTIDE_TOKEN or EBBTIDE_TOKEN_FILE,
    EBBTIDE_TLS_CA, EBBTIDE_TLS_CERT and EBBTIDE_TLS_KEY.

    While a service is away, calls are repeated and streams resume at their position, so callers do not notice a
    restarted coordinator. After `patience_s` seconds they raise `Unavailable` naming the service and its address.
    """

    def __init__(
        self,
        coordinator: str | None = None,
        relay: str | None = None,
        *,
        token: str | None = None,
        tls_ca: str | None = None,
        security: ClientSecurity | None = None,
        patience_s: float = 60.0,
    ) -> None:
        """Raises `InvalidRequest` for a bad address, a missing token, or an address off the loopback without TLS."""
        self._security = security or client_security(token, tls_ca)
        self._patience_s = patience_s
        self._coordinator = self._peer("coordinator", coordinator or os.environ.get("EBBTIDE_COORDINATOR", COORDINATOR))
        self._relay_address = relay or os.environ.get("EBBTIDE_RELAY", RELAY)
        self._relay: RelayClient | None = None
        self._runs = RunsStub(self._coordinator.channel)
        self._rollouts = RolloutsStub(self._coordinator.channel)
        self._peers = [self._coordinator]
        self._holder = _own_holder()  # of leases, unless a call names another
        self._publishers: set[Publisher] = set()  # the open ones

    def _peer(self, service: str, target: str) -> ServicePeer:
        return ServicePeer(service, target, self._security, self._patience_s)

    def _weights(self) -> "RelayClient":
        if self._relay is None:
            from ebbtide.client.relay_client import RelayClient

            peer = self._peer("weight-relay", check_address(self._relay_address, field="relay"))
            self._peers.append(peer)
            self._relay = RelayClient(peer)
        return self._relay

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Unfinished versions get some seconds, then they are abandoned."""
        for publisher in list(self._publishers):
            await publisher.aclose(LEAVE_S)
        for peer in self._peers:
            await peer.close()

    @property
    def coordinator(self) -> str:
        """The address of the coordinator in use."""
        return self._coordinator.target

    @property
    def relay(self) -> str:
        """The address of the relay."""
        return self._relay_address

    async def reach(self, within_s: float, *, relay: bool = False) -> None:
        """Connect to the coordinator, or to the relay. Raises `Unavailable` without an answer in `within_s` seconds, so
        that a caller with much patience learns soon that nobody is there.
        """
        await (self._weights().peer if relay else self._coordinator).reach(within_s)

    # -- runs ----------------------------------------------------------------------------------------------------

    async def submit(self, spec: RunSpec | Mapping[str, Any] | str | Path, run_id: str | None = None) -> Run:
        """Submit a run: a spec, a mapping, or the path of a TOML file. Idempotent if `run_id` is given.

        Raises `InvalidRequest` naming the wrong field, `AlreadyExists` if `run_id` belongs to another run, and
        `NoCapacity` if the caller has as many live runs as the coordinator's `max_runs_per_user`.
        """
        checked = check_spec(read_spec(spec))
        request = runs_pb2.SubmitRunRequest(
            run_id=run_id or new_run_id(checked.name), spec=to_proto(checked, types_pb2.RunSpec)
        )
        made = await self._coordinator.call(self._runs.SubmitRun, request, timeout_s=DURABLE_TIMEOUT_S)
        return from_proto(made, Run)

    async def run(self, run_id: str) -> Run:
        """Return the run's present state. Raises `NotFound`."""
        return from_proto(await self._coordinator.call(self._runs.GetRun, runs_pb2.GetRunRequest(run_id=run_id)), Run)

    async def runs(self) -> list[Run]:
        """Return all runs that have a record, oldest first."""
        request, found = runs_pb2.ListRunsRequest(page_size=_PAGE), list[Run]()
        while True:
            answer = await self._coordinator.call(self._runs.ListRuns, request)
            found += [from_proto(run, Run) for run in answer.runs]
            if not answer.next:
                return found
            request.cursor = answer.next

    async def cancel(self, run_id: str) -> Run:
        """End a run; its live rollouts are dropped. Raises `NotFound`."""
        request = runs_pb2.CancelRunRequest(run_id=run_id)
        ended = await self._coordinator.call(self._runs.CancelRun, request, timeout_s=DURABLE_TIMEOUT_S)
        return from_proto(ended, Run)

    async def watch(self, run_id: str, cursor: str = "") -> AsyncGenerator[RunEvent, None]:
        """Yield a run's events after `cursor`, then new ones until it has ended."""
        request = runs_pb2.WatchRunRequest(run_id=run_id, cursor=cursor)
        async for message in self._coordinator.follow(lambda: self._runs.WatchRun(request)):
            request.cursor = message.cursor
            yield from_proto(message, RunEvent)

    async def key_usage(self, run_id: str) -> list[KeyUsage]:
        """Return what clients' keys with limits have used of a run, by their owners."""
        request = rollouts_pb2.ListKeyUsageRequest(run_id=run_id)
        answer = await self._coordinator.call(self._rollouts.ListKeyUsage, request)
        return [from_proto(one, KeyUsage) for one in answer.usage]

    async def workers(self) -> list[Worker]:
        """Return the attached workers, and those lost lately, by their ids."""
        stub = FleetStub(self._coordinator.channel)
        request, found = fleet_pb2.ListWorkersRequest(page_size=_PAGE), list[Worker]()
        while True:
            answer = await self._coordinator.call(stub.ListWorkers, request)
            found += [from_proto(worker, Worker) for worker in answer.workers]
            if not answer.next:
                return found
            request.cursor = answer.next

    async def drain_worker(self, worker_id: str, within_s: float = 30.0) -> int:
        """Tell a worker to hand over its rollouts within `within_s` seconds and leave; returns their number.

        Returns when the request has reached the worker. The worker has left when `workers` no longer lists it, or lists
        it as lost. Raises `NotFound`.
        """
        request = fleet_pb2.DrainWorkerRequest(worker_id=worker_id, within_s=within_s)
        stub = FleetStub(self._coordinator.channel)
        return (await self._coordinator.call(stub.DrainWorker, request)).running

    async def timeline(
        self, run_id: str, cursor: str = "", *, requests: bool = False
    ) -> AsyncGenerator[AttemptSpan, None]:
        """Yield the finished attempts of a run after `cursor`, oldest first: those at gateways' `requests`, or all
        others. Raises `NotFound`.
        """
        request = runs_pb2.ReadTimelineRequest(run_id=run_id, cursor=cursor, requests=requests)
        async for message in self._coordinator.follow(lambda: self._runs.ReadTimeline(request)):
            request.cursor = message.cursor
            yield from_proto(message, AttemptSpan)

    async def trajectories(self, run_id: str, cursor: str = "") -> AsyncGenerator[Trajectory, None]:
        """Yield a live run's trajectories after `cursor`, oldest first, then new ones until it has ended. They stay
        until a checkpoint holds them. Raises `NotFound`, and `LeaseSuperseded` if the run had ended before.
        """
        request = rollouts_pb2.WatchTrajectoriesRequest(run_id=run_id, cursor=cursor)
        async for message in self._coordinator.follow(lambda: self._rollouts.WatchTrajectories(request)):
            request.cursor = message.cursor
            yield from_proto(message, Trajectory)

    async def stream_tokens(self, run_id: str, rollout_id: str, offset: int = 0) -> AsyncGenerator[TokenChunk, None]:
        """Yield a rollout's tokens from `offset` as they are generated; the last chunk has a reason.

        Raises `NotFound`, and `LeaseSuperseded` if the run ends before the rollout.
        """
        from ebbtide.types.tokens import token_count

        request = rollouts_pb2.StreamTokensRequest(run_id=run_id, rollout_id=rollout_id, offset=offset)
        async for message in self._coordinator.follow(lambda: self._rollouts.StreamTokens(request)):
            request.offset = message.offset + token_count(message.tokens)
            chunk = from_proto(message, TokenChunk)
            yield chunk
            if chunk.reason is not None:
                return

    # -- weights -------------------------------------------------------------------------------------------------

    async def versions(self, run_id: str, policy: str = "policy") -> AsyncGenerator[VersionInfo, None]:
        """Yield the versions of a policy that the relay holds, then each new one as it is committed."""
        async for info in self._weights().versions(run_id, policy):
            yield info

    async def describe_weights(self, run_id: str) -> WeightsState:
        """Return the relay's versions of a run, their holders, and the traffic of each link.

        Raises `NotFound` if the relay does not know the run.
        """
        state = await self._weights().describe(run_id)
        if not state.versions and not state.holders:
            raise NotFound(
                f"the weight-relay at {self._relay_address} knows no version of run {run_id}: check the run's id and "
                "relay, or wait for its first version"
            )
        return state

    async def fetch_weights(
        self,
        run_id: str,
        policy: str = "policy",
        version: int = 0,
        *,
        boxes: Mapping[str, Box] | None = None,
        publisher: bytes = b"",
    ) -> "tuple[Manifest, dict[str, NamedTensor]]":
        """Fetch a version (0: the newest) and its tensors, verified; `ebbtide.weights.as_array` views them in numpy.

        `boxes` selects tensors, and a slice of each: first index and end in each dimension. Only these slices are
        fetched. If `publisher`, a public key of 32 bytes, is given, it must have signed the version. Raises
        `VersionUnavailable` if the relay does not hold it, `PermissionDenied` for another publisher's version,
        `InvalidRequest` naming a tensor that has no such slice.
        """
        return await self._weights().fetch(run_id, policy, version, boxes, publisher)

    def publisher(self, run_id: str, exchange: "RankExchange", policy: str = "policy") -> "Publisher":
        """Make the publisher of a rank's own shards, on every rank except 0, which uses `Lease.publisher`.

        All ranks publish together. The publisher holds up to two copies of the shards until it or this client closes.
        """
        publisher = self._weights().publisher(
            run_id, policy, authority=None, exchange=exchange, forget=self._publishers.discard
        )
        self._publishers.add(publisher)
        return publisher

    # -- leases --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def claim(
        self, run_id: str | None = None, role: Role = "trainer", *, holder: str = "", wait: bool = True
    ) -> AsyncIterator[Lease]:
        """`acquire` for the length of a block, at whose end the lease is released."""
        lease = await self.acquire(run_id, role, holder=holder, wait=wait)
        try:
            yield lease
        finally:
            await lease.release()

    async def acquire(
        self, run_id: str | None = None, role: Role = "trainer", *, holder: str = "", wait: bool = True
    ) -> Lease:
        """Take the lease of a role on a run, or on any run that needs the role.

        A `holder` that claims again ends its former lease at once; without one, this client is the holder. With `wait`,
        waits until a lease is free, and prefers runs that have begun (`ebbtide.coordinator.api.runs`); else
        raises `NotReady` or `NotFound`.
        """
        request = runs_pb2.ClaimRunRequest(run_id=run_id or "", role=role, holder=holder or self._holder)
        return Lease(self._coordinator, await self._claim(request, wait=wait), self._weights)

    @asynccontextmanager
    async def claim_gateway(self, run_id: str, *, holder: str = "") -> AsyncIterator[GatewayLease]:
        """`acquire_gateway` for the length of a block, at whose end the lease is released."""
        lease = await self.acquire_gateway(run_id, holder=holder)
        try:
            yield lease
        finally:
            await lease.release()

    async def acquire_gateway(self, run_id: str, *, holder: str = "") -> GatewayLease:
        """Take a lease to serve clients of a run. Any number of holders have one; each that claims again ends its own
        former one at once. Raises `NotFound`, `LeaseSuperseded` if the run has ended, and `NoCapacity` beyond 1,024.
        """
        request = runs_pb2.ClaimRunRequest(run_id=run_id, role=GATEWAY, holder=holder or self._holder)
        return GatewayLease(self._coordinator, await self._claim(request, wait=False))

    async def _claim(self, request: runs_pb2.ClaimRunRequest, *, wait: bool) -> runs_pb2.Lease:
        began = time.monotonic()
        for pause in pauses(0.2, 2.0):
            if wait:
                request.waited_s = time.monotonic() - began
            try:
                return await self._coordinator.call(self._runs.ClaimRun, request, timeout_s=DURABLE_TIMEOUT_S)
            except (NotReady, NotFound, NoCapacity) as error:
                if not wait or (isinstance(error, NotFound) and request.run_id):
                    raise
            await asyncio.sleep(pause)
        raise NotReady("not claimed")


def _own_holder() -> str:
    """A name that no other client has: containers may share a host's name, and have the same process ids."""
    return f"{socket.gethostname()[:_HOST_CHARACTERS]}-{os.getpid()}-{new_fence()}"


def read_spec(spec: RunSpec | Mapping[str, Any] | str | Path) -> RunSpec:
    """Read a run's spec from a mapping or a TOML file. Raises `InvalidRequest` naming the key; of a file, all that is
    wrong with it, by line and column.
    """
    if isinstance(spec, RunSpec):
        return spec
    if isinstance(spec, Mapping):
        return parse(RunSpec, spec)
    file = SpecFile(Path(spec))
    file.refuse_noted()
    return file.spec


def client_security(
    token: str | None = None, tls_ca: str | None = None, *, token_file: str | None = None
) -> ClientSecurity:
    """The credentials of a client, of which unset ones come from variables. Raises `InvalidRequest`."""
    given = {name: os.environ.get(f"EBBTIDE_{name.upper()}", "") for name in ClientSecurity.__struct_fields__}
    if token is not None:
        given |= {"token": token, "token_file": ""}
    if token_file is not None:
        given |= {"token": "", "token_file": token_file}
    if tls_ca is not None:
        given["tls_ca"] = tls_ca
    return parse(ClientSecurity, {name: value for name, value in given.items() if value}, strict=False)
