"""Stores runs: their records, ends and policy versions, leases to act for them, their events and timelines.

Of a lease, the fence decides; the expiry only says when others may claim. Events from which drivers and trainers
recover are never trimmed. A timeline has one span per ended attempt, which the script that ends the attempt writes.
"""

import asyncio
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from ebbtide.errors import AlreadyExists, Internal, InvalidRequest, NoCapacity, NotReady, StoreUnavailable
from ebbtide.store.connection import StoreRefused, Topic, no_run
from ebbtide.store.records import UNEXPECTED, LeaseHolder, json_object, json_record, pack, pairs, text_pairs, unpack
from ebbtide.store.scripts import FLEET, INDEX, LIFE, PUBLISHERS, run_key, script
from ebbtide.types.ids import MAX_EVENT_BYTES, new_fence, shortened
from ebbtide.types.run import GATEWAY, ROLES, AttemptSpan, LeaseRef, Run, RunEvent, RunSpec, RunStatus, gateway_role
from ebbtide.types.weights import PolicyVersion

#: Gateways that end give their leases back.
_RETRY_AFTER_S: Final = 30.0


class LeaseTopic(Topic):
    async def claim(self, run_id: str, role: str, holder: str, ttl_s: float) -> LeaseRef:
        """Take the lease, which ends the former fence. Raises `NotReady` while another holder renews it, `NoCapacity`
        if the run has too many gateways. Each gateway has a lease of its own, in a role of its own.
        """
        fence: Final = new_fence()
        role = gateway_role(holder) if role == GATEWAY else role
        try:
            number = await self._write("lease_claim", run_id, role, fence, holder, round(ttl_s * 1000))
        except StoreRefused as refused:
            if refused.code == "GATEWAYS":
                text = f"run {run_id} has {refused.detail} gateways, and takes no more; stop some, or wait"
                raise NoCapacity(text, retry_after_s=_RETRY_AFTER_S) from None
            rest, _, other = refused.detail.partition(" ")
            raise NotReady(
                f"the {role} lease of run {run_id} is held by {other}; "
                f"it is free in {int(rest) / 1000:.1f} s unless it is renewed"
            ) from None
        await self._link.durable()
        return LeaseRef(run_id=run_id, role=role, fence=fence, number=int(number))

    async def held(self, run_id: str) -> dict[str, LeaseHolder]:
        """The holders of a run's roles."""
        keys = [run_key(run_id, "CLAIM", role) for role in ROLES]
        holders = await asyncio.gather(*(self._link.call("GET", key) for key in keys))
        rests = await asyncio.gather(*(self._link.call("PTTL", key) for key in keys))
        return {
            role: LeaseHolder(holder.decode(), max(0, rest) / 1000)
            for role, holder, rest in zip(ROLES, holders, rests, strict=True)
            if holder
        }

    async def renew(self, lease: LeaseRef, ttl_s: float) -> None:
        await self._leased("lease_renew", lease, round(ttl_s * 1000))

    async def release(self, lease: LeaseRef) -> None:
        await self._leased("lease_release", lease)


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
        self._quarantined_runs.add(run_id)

    async def take_over_run(self, run_id: str) -> bool:
        """Take over one run. Returns whether it is live."""
        live = bool(await self._run("claim_term", run_id, self._term))
        if live:
            self._quarantined_runs.discard(run_id)
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
            # A coordinator of the commit before wrote it without the newer fields, and with its own defaults.
            if (await self.read(run_id)).spec not in (spec, _with_former_defaults(spec)):
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


def _with_former_defaults(spec: RunSpec) -> RunSpec:
    """The spec as the commit before reads it where it sets nothing."""
    if spec.trainer.dtype != "auto":
        return spec
    return msgspec.structs.replace(spec, trainer=msgspec.structs.replace(spec.trainer, dtype="float32"))


def _spec(run_id: str, data: bytes) -> RunSpec:
    try:
        return _decoded(data)
    except msgspec.ValidationError as error:
        raise NotReady(
            f"the spec of run {run_id} is of another release of Ebbtide, and this one cannot read it ({error}); "
            "start a coordinator of that release to continue or end the run"
        ) from None


#: Events per page, which bounds the memory of one read.
PAGE: Final = 256
#: Bytes of an event that are reserved for other fields than its message.
_REST: Final = 1 << 10


class EventTopic(Topic):
    async def report(self, lease: LeaseRef, events: Sequence[RunEvent], *, quota_bytes: int) -> None:
        """Append a lease holder's events. Events whose kind and key exist already are dropped.

        Raises `NoCapacity` if the events that are never trimmed take more than the run's quota.
        """
        try:
            await self._leased("report", lease, quota_bytes, *_flat(events))
        except StoreRefused:
            text = f"the events of run {lease.run_id} fill its quota_bytes ({quota_bytes}); report less, or end the run"
            raise NoCapacity(text) from None

    async def note(self, run_id: str, event: RunEvent) -> None:
        """Append an event of the coordinator. Too long a message is cut."""
        event = msgspec.structs.replace(event, message=shortened(event.message, MAX_EVENT_BYTES - _REST))
        await self._write("report", run_id, "", "", "", *_flat([event]))

    async def page(self, run_id: str, cursor: str) -> list[RunEvent]:
        """Up to `PAGE` events after `cursor` (empty: from the first one), oldest first."""
        entries = await self._run("events_page", run_id, cursor or "0-0", PAGE)
        return [_event(cursor.decode(), fields) for cursor, fields in entries]


def _flat(events: Sequence[RunEvent]) -> list[str]:
    return [
        part
        for event in events
        for part in (event.kind, event.key, event.message, json_object(event.values), json_object(event.labels))
    ]


def _event(cursor: str, fields: list[bytes]) -> RunEvent:
    have = dict(pairs(fields))
    return RunEvent(
        cursor=cursor,
        kind=have[b"k"].decode(),
        key=have[b"key"].decode(),
        message=have[b"m"].decode(),
        values=msgspec.json.decode(have[b"v"], type=dict[str, float]),
        labels=msgspec.json.decode(have[b"l"], type=dict[str, str]),
        age_s=int(have[b"at"]) / 1000,
    )


#: Spans per page, which bounds the memory of one read.
SPAN_PAGE: Final = 512


class SpanTopic(Topic):
    async def page(self, run_id: str, cursor: str, *, requests: bool = False) -> list[AttemptSpan]:
        """Up to `SPAN_PAGE` spans after `cursor` (empty: from the first one kept), in the order of their ends.

        `requests`: those of gateways' requests, which have a stream and cursors of their own, instead of all others.
        """
        key = run_key(run_id, "REQUEST_SPANS" if requests else "SPANS")
        entries = await self._link.call("XRANGE", key, f"({cursor or '0-0'}", "+", "COUNT", SPAN_PAGE)
        return [_span(entry.decode(), fields) for entry, fields in entries]


def _span(cursor: str, fields: list[bytes]) -> AttemptSpan:
    have = dict(pairs(fields))
    first_version, last_version = struct.unpack("<II", have[b"v"]) if have[b"v"] else (0, 0)
    group, episode, turn = have[b"o"].decode().split(" ") if have[b"o"] else ("", "", "0")
    return AttemptSpan(
        cursor=cursor,
        rollout_id=have[b"r"].decode(),
        attempt_id=have[b"a"].decode(),
        worker_id=have[b"w"].decode(),
        first=int(have[b"f"]),
        last=int(have[b"l"]),
        begin_s=int(have[b"b"]) / 1000,
        end_s=int(have[b"e"]) / 1000,
        end=have[b"why"].decode(),
        cause=int(have[b"c"]),
        first_version=first_version,
        last_version=last_version,
        group_id=group,
        episode_id=episode,
        turn=int(turn),
        evaluation=have.get(b"k") == b"eval",
        request=have.get(b"k") == b"request",
        prompt_tokens=int(have.get(b"p", 0)),
        step=int(have[b"s"]) if have.get(b"s") else None,
    )
