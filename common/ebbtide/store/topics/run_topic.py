"""Stores runs: their records, ends, and policy versions."""

from typing import Final, NamedTuple

import msgspec

from ebbtide.errors import AlreadyExists, Internal, InvalidRequest, NotReady, StoreUnavailable
from ebbtide.store.link.store_faults import StoreRefused
from ebbtide.store.lua_scripts import script
from ebbtide.store.record_codec import json_record, pack, pairs, text_pairs, unpack
from ebbtide.store.store_keys import FLEET, INDEX, LIFE, PUBLISHERS, run_key
from ebbtide.store.topics.topic import Topic, no_run
from ebbtide.store.unexpected_data import UNEXPECTED
from ebbtide.types.run import ROLES, LeaseRef, Run, RunSpec, RunStatus
from ebbtide.types.weights import PolicyVersion

_SWEEP_PAGE: Final = 500
_DROPPED: Final = "dropped:"


class EndedHistory(NamedTuple):
    run_id: str
    ended: float  # seconds, the store's clock
    size: int  # bytes of its events and timeline


class TakenRuns(NamedTuple):
    live: list[str]  # oldest first
    ended: list[str]
    broken: dict[str, Exception]  # live for all that is known


class RunTopic(Topic):
    async def take_over(self) -> TakenRuns:
        """Take over every run as the leader, which bars the former one. A run with unexpected data is left alone until
        `take_over_run` succeeds.
        """
        taken = TakenRuns([], [], {})
        for run_id in await self.ids():
            try:
                (taken.live if await self.take_over_run(run_id) else taken.ended).append(run_id)
            except UNEXPECTED as error:
                taken.broken[run_id] = error
                self.leave_alone(run_id)
        await self._link.durable()
        return taken

    def leave_alone(self, run_id: str) -> None:
        """Write nothing to a live run with unexpected data, and delete nothing of it, until it is taken over again."""
        self._untaken.add(run_id)

    async def take_over_run(self, run_id: str) -> bool:
        """Take over one run. Returns whether it is live."""
        live = bool(await self._run("claim_term", run_id, self._term))
        if live:
            self._untaken.discard(run_id)
        return live

    async def reconciled_incarnation(self) -> str:
        """The store's incarnation in which all runs were last reconciled; see `StoreConnection.incarnation`."""
        return (await self._link.call("GET", LIFE) or b"").decode()

    async def keep_incarnation(self, incarnation: str) -> None:
        await self._link.run(script("keep_incarnation"), FLEET, self._term, incarnation)

    async def secret(self, ours: bytes) -> bytes:
        """The fleet's secret in the store; if there is none, `ours` becomes the secret."""
        incarnation = self._link.incarnation
        await self._link.call("SET", PUBLISHERS, ours, "NX", incarnation=incarnation)
        found: bytes = await self._link.call("GET", PUBLISHERS, incarnation=incarnation)
        return found

    async def settle(self, run_id: str, ttl_s: float) -> bool:
        """Make a run safe to continue after the store may have forgotten a part of it. Returns whether the run is live.

        Numbers that watchers have seen are not used again, and leases that could not be renewed last for `ttl_s` again.
        """
        return bool(await self._write("settle", run_id, round(ttl_s * 1000), *ROLES))

    async def ids(self) -> list[str]:
        """All runs with a record, oldest first."""
        return [member.decode() for member in await self._link.call("ZRANGE", INDEX, 0, -1)]

    async def listed(self, cursor: float, count: int, *, newest_first: bool = False) -> list[tuple[int, str]]:
        """Places and ids of runs with a record beyond the place `cursor`, by the order of their submission."""
        ends = (f"({cursor}", "-inf") if newest_first else (f"({cursor}", "+inf")
        command = "ZREVRANGEBYSCORE" if newest_first else "ZRANGEBYSCORE"
        found = text_pairs(await self._link.call(command, INDEX, *ends, "WITHSCORES", "LIMIT", 0, count))
        return [(int(float(place)), run_id) for run_id, place in found]

    async def submit(self, run_id: str, spec: RunSpec, submitter: str = "") -> bool:
        """Create the run; False if it exists. Raises `AlreadyExists` if it exists with another spec.

        It is not durable yet: callers hold locks here, so they wait for that later.
        """
        try:
            args = (run_id, json_record(spec), submitter, spec.quota_bytes)
            made = bool(await self._write("submit_run", run_id, *args))
        except StoreRefused:
            made = False
            if (await self.read(run_id)).spec != spec:  # an older release wrote it without the newer fields
                raise AlreadyExists(f"run {run_id} exists with another spec; choose another run_id") from None
        return made

    async def check_specs(self) -> None:
        """Check that this program can read the spec of every live run, unless its data is broken. Raises
        `StoreUnavailable`.
        """
        for run_id in await self.ids():
            try:
                spec = await self._link.call("HGET", run_key(run_id, "RUN"), "spec")
                if spec and await self.lives(run_id):
                    _spec(run_id, spec)
            except NotReady as error:
                raise StoreUnavailable(str(error)) from None
            except UNEXPECTED:  # `take_over` tells it
                continue

    async def lives(self, run_id: str) -> bool:
        """Whether the run exists and has not ended."""
        return bool(await self._link.call("EXISTS", run_key(run_id, "FENCE")))

    async def read(self, run_id: str) -> Run:
        """Raises `NotFound`; `NotReady` if another release wrote a record that this one cannot read."""
        found = await self._run("read_run", run_id, *ROLES)
        if not found:
            raise no_run(run_id)
        try:
            return _run(run_id, *found)
        except (KeyError, ValueError) as error:
            raise Internal(f"the record of run {run_id} makes no sense: {error!r}") from None

    async def waiting(self, run_id: str) -> tuple[int, int, int]:
        """The run's bytes that count towards its quota, its uncommitted trajectories, and its open sessions."""
        used, trajectories, sessions = await self._run("quota_used", run_id)
        return int(used), int(trajectories), int(sessions)

    async def forget(self, run_id: str) -> None:
        """Take a run whose record has expired off the list."""
        await self._write("delist", run_id, run_id)

    async def end(
        self, run_id: str, status: RunStatus, message: str, *, drop: str, lease: LeaseRef | None, keep_s: float
    ) -> None:
        """End the run, and drop its open training rollouts as `drop`. Idempotent.

        Raises `NotReady` for FINISHED while training rollouts are open.
        """
        role, fence = (lease.role, lease.fence) if lease else ("", "")
        strict = int(status is RunStatus.FINISHED)
        try:
            await self._write("end_run", run_id, role, fence, status.name, message, drop, strict, round(keep_s), *ROLES)
        except StoreRefused as refused:
            raise NotReady(
                f"{refused.detail} training rollouts of run {run_id} are neither trained nor dropped; "
                "commit, acknowledge or cancel them first"
            ) from None
        await self._link.durable()

    async def sweep(self, run_id: str) -> bool:
        """Delete a page of an ended run's data. False when all is gone, or if the run is live.

        The latter happens if a former coordinator began the run's submission, and this one completed it.
        """
        try:
            return bool(await self._write("sweep_run", run_id, _SWEEP_PAGE))
        except StoreRefused as refused:
            if refused.code != "LIVE":
                raise
            return False

    async def ended_history(self, run_id: str) -> EndedHistory | None:
        """What an ended run keeps of its past. None for a live run, and for one whose record has expired."""
        found = await self._run("ended_history", run_id)
        return EndedHistory(run_id, int(found[0]) / 1000, int(found[1])) if found else None

    async def drop_history(self, run_id: str) -> None:
        """Delete the events and the timeline of an ended run."""
        await self._write("drop_history", run_id)

    async def reserve_version(self, lease: LeaseRef) -> int:
        """A number for a new version, unique in the run: it is durable before it is returned."""
        number = int(await self._leased("reserve_version", lease))
        await self._link.durable()
        return number

    async def announce(self, lease: LeaseRef, version: PolicyVersion) -> bool:
        """Make `version` the newest; False for a repeat. Raises `AlreadyExists`, `InvalidRequest`."""
        try:
            return bool(await self._leased("announce_version", lease, version.version, pack(version), version.step))
        except StoreRefused as refused:
            if refused.code == "TAKEN":
                raise AlreadyExists(f"version {version.version} was announced with another content") from None
            remedy = (
                "reserve it first" if refused.code == "UNRESERVED" else f"{refused.detail} is newer; reserve a new one"
            )
            raise InvalidRequest(f"{version.version} cannot be announced: {remedy}", field="version.version") from None

    async def versions(self, run_id: str) -> dict[int, PolicyVersion]:
        """All announced versions of a live run."""
        flat = await self._link.call("HGETALL", run_key(run_id, "VERSIONS"))
        return {int(key): unpack(value, PolicyVersion) for key, value in pairs(flat)}


def _run(run_id: str, record: list[bytes], counts: list[bytes], age_ms: int, holders: list[bytes]) -> Run:
    have = {key.decode(): value for key, value in pairs(record)}
    counters = {key.decode(): int(value) for key, value in pairs(counts)}
    return Run(
        run_id=run_id,
        spec=_spec(run_id, have["spec"]),
        status=RunStatus[have["status"].decode()],
        message=have["message"].decode(),
        submitter=have.get("submitter", b"").decode(),
        age_s=age_ms / 1000,
        newest=unpack(have["newest_record"], PolicyVersion) if "newest_record" in have else None,
        counters={name: value for name, value in counters.items() if not name.startswith(_DROPPED)},
        dropped={name.removeprefix(_DROPPED): n for name, n in counters.items() if name.startswith(_DROPPED)},
        holders={role: holder.decode() for role, holder in zip(ROLES, holders, strict=True) if holder},
    )


#: Tables and keys that a spec of the commit before may have, and that nobody reads any more.
_GONE: Final = (("tail", "adaptive_rewards"),)


def _decoded(data: bytes) -> RunSpec:
    try:
        return msgspec.json.decode(data, type=RunSpec)
    except msgspec.ValidationError:
        tree = msgspec.json.decode(data)
        gone = [tree[table].pop(key) for table, key in _GONE if isinstance(tree, dict) and key in tree.get(table, {})]
        if not gone:
            raise
        return msgspec.json.decode(msgspec.json.encode(tree), type=RunSpec)


def _spec(run_id: str, data: bytes) -> RunSpec:
    try:
        return _decoded(data)
    except msgspec.ValidationError as error:
        raise NotReady(
            f"the spec of run {run_id} is of another release of Ebbtide, and this one cannot read it ({error}); "
            "start a coordinator of that release to continue or end the run"
        ) from None
