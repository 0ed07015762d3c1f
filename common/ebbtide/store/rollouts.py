"""Moves rollouts from submit to end: queued, running with its tokens, finished, over. Each is one repeatable script.

Finished rollouts pass to the driver, and trajectories to the trainer.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import msgspec

from ebbtide.append_stream import AppendAck, AppendColumns
from ebbtide.errors import AlreadyExists, InvalidRequest, LeaseSuperseded, NoCapacity, NotFound
from ebbtide.store.connection import StoreRefused, Topic
from ebbtide.store.records import (
    AcceptedRollout,
    AccountCharge,
    AdoptedAttempt,
    AttemptStatus,
    EndedAttempt,
    OpenRollout,
    PlacedRollout,
    RequeuedRollout,
    RolloutState,
    body_digest,
    pack,
    text_pairs,
    unpack,
)
from ebbtide.types.fleet import AppendStatus, EndReason
from ebbtide.types.rollout import (
    Episode,
    FinishedRollout,
    FinishReason,
    RolloutKind,
    RolloutRequest,
    SubmitOrder,
    SubmitOutcome,
    TokenChunk,
    Trajectory,
    TrajectoryOutcome,
)
from ebbtide.types.run import LeaseRef, is_gateway
from ebbtide.types.tokens import TOKEN_BYTES, record_count

_PAGE: Final = 256
#: Rollouts packed, or unpacked, between two turns of other calls.
_AT_ONCE: Final = 64
#: Bytes of rollouts that one call places, but for the last one: the store builds and sends the answer in one go.
_PLACE_BYTES: Final = 1 << 20
#: Callers retry a full run after this time: about one flush of finished rollouts.
_RETRY_AFTER_S: Final = 1.0
_UNORDERED: Final = SubmitOrder()
_FREE: Final = AccountCharge()
#: The kinds' names in the store.
_KINDS: Final = {RolloutKind.TRAIN: "train", RolloutKind.EVAL: "eval", RolloutKind.REQUEST: "request"}


class RolloutTopic(Topic):
    async def submit(
        self,
        lease: LeaseRef,
        requests: Sequence[RolloutRequest],
        *,
        quota_bytes: int,
        max_open: int,
        order: SubmitOrder = _UNORDERED,
        charge: AccountCharge = _FREE,
    ) -> list[AcceptedRollout]:
        """Queue all or none. Raises `AlreadyExists` (an id with another body), `NoCapacity` (a full quota or queue)."""
        parts: list[bytes | str] = []
        for number, request in enumerate(requests):
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)  # other calls have their turn
            bare = msgspec.structs.replace(request, prompt_ids=b"", client_digest=b"")
            origin = f"{request.group_id} {request.episode_id} {request.turn}"
            digests = body_digest(request) + request.client_digest
            parts += [request.rollout_id, digests, _KINDS[request.kind]]
            parts += [pack(bare), request.prompt_ids, origin, str(_score_bytes(request))]
        try:
            found = await self._leased(
                "submit", lease, quota_bytes, max_open, *_order_columns(order), *_charge_columns(charge), *parts
            )
        except StoreRefused as refused:
            if refused.code == "TAKEN":
                taken = requests[int(refused.detail)].rollout_id
                raise AlreadyExists(f"rollout {taken} was submitted with another body; choose another id") from None
            what = {
                "QUOTA": f"{refused.detail} of its quota_bytes ({quota_bytes})",
                "QUEUE": f"{refused.detail} of {max_open} places in its queue",
            }[refused.code]
            remedy = "complete, commit or acknowledge finished ones"
            if is_gateway(lease.role):
                remedy = "gateways may use three quarters; end sessions, or wait for finished requests to go"
            elif order.step is not None and not order.first_step:
                remedy += ", and give first_step: ids of lower steps are kept until then"
            text = f"run {lease.run_id} uses {what}; {remedy}"
            raise NoCapacity(text, retry_after_s=_RETRY_AFTER_S) from None
        return [_accepted(outcome, rest) for outcome, rest in found]

    async def place(self, run_id: str, placements: Sequence[tuple[str, str, str]]) -> list[PlacedRollout | None]:
        """Give queued rollouts to workers, as (rollout, attempt, worker). None: the rollout is no longer queued.

        Prompts and partials come back, so the answer ends after the rollout that fills it, and the rest stay queued.
        """
        flat = (part for placement in placements for part in placement)
        found = await self._write("place", run_id, _PLACE_BYTES, *flat)
        return [None if row == 0 else _placed(*row) for row in found]

    async def requeue(
        self, run_id: str, attempts: Sequence[EndedAttempt], why: EndReason
    ) -> list[RequeuedRollout | None]:
        """End attempts, and queue their rollouts again. None: the attempt does not run."""
        flat = (part for one in attempts for part in (one.rollout_id, one.attempt_id, one.tokens))
        noticed = "" if why.noticed_s is None else f"{why.noticed_s:.3f}"
        flags = (int(why.blame), int(why.avoid), int(why.moved))
        found = await self._write("requeue", run_id, why.text, int(why.cause), *flags, noticed, *flat)
        return [
            None if row == 0 else RequeuedRollout(row[0], row[1], row[2].decode(), _workers(row[3])) for row in found
        ]

    async def tally(self, run_id: str, observations: Sequence[tuple[str, float]]) -> None:
        """Count observations of the coordinator, as (histogram, value). Do not repeat it: repeats would count twice."""
        await self._write("tally", run_id, *(part for name, value in observations for part in (name, f"{value:.3f}")))

    async def adopt(
        self, run_id: str, attempts: Sequence[tuple[str, str, str]], *, newer: bool
    ) -> list[AdoptedAttempt]:
        """Record attempts as running, as (rollout, attempt, worker), which the store may have forgotten.

        `newer`: they are known to be newer than any attempt of their rollouts in the store.
        """
        flat = (part for attempt in attempts for part in (*attempt, int(newer)))
        found = await self._write("adopt", run_id, *flat)
        return [AdoptedAttempt(AttemptStatus(status), stored) for status, stored in found]

    async def dead_letter(self, run_id: str, letters: Sequence[tuple[str, str]]) -> int:
        """Finish queued rollouts as dead letters, as (rollout, evidence). Returns how many were queued."""
        return int(await self._write("dead_letter", run_id, *(part for letter in letters for part in letter)))

    async def cancel(self, lease: LeaseRef, rollout_ids: Sequence[str], reason: str) -> list[tuple[str, str]]:
        """Drop rollouts in any state; requests finish as cancelled. Returns (rollout, attempt) of those that ran, and
        of requests that were queued, with an empty attempt. Raises `InvalidRequest` if a gateway names other rollouts.
        """
        try:
            return text_pairs(await self._leased("cancel", lease, reason, *rollout_ids))
        except StoreRefused as refused:
            text = "is no request, and under a gateway's lease nothing else can be cancelled"
            raise InvalidRequest(text, field=f"rollout_ids[{refused.detail}]") from None

    async def acknowledge(
        self, lease: LeaseRef, rollout_ids: Sequence[str], drop_reason: str, *, trusted: bool = False
    ) -> list[str]:
        """End finished rollouts and delete them: all, or none. Returns their episodes, but for those that were over.
        Raises `InvalidRequest` for unknown or unfinished ones.

        `trusted` allows unfinished ones: see `TrajectoryTopic.complete`.
        """
        try:
            episodes = await self._leased("acknowledge", lease, drop_reason, int(trusted), *rollout_ids)
        except StoreRefused as refused:
            raise open_or_unknown(refused, rollout_ids, field="rollout_ids") from None
        return [episode.decode() for episode in episodes]

    async def open_rollouts(self, run_id: str) -> AsyncGenerator[OpenRollout, None]:
        """All queued and running rollouts, oldest first. The store reads a page while the one before it is used, so
        close the generator (`aclosing`) where it may be left early.
        """
        reading = asyncio.ensure_future(self._run("read_open", run_id, 0, _PAGE))
        try:
            while rows := await reading:
                reading = asyncio.ensure_future(self._run("read_open", run_id, int(rows[-1][0]), _PAGE))
                for number, row in enumerate(rows):
                    if number % _AT_ONCE == 0:
                        await asyncio.sleep(0)  # the next page is asked for, and other calls have their turn
                    yield _open(row)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def open_or_unknown(refused: StoreRefused, rollout_ids: Sequence[str], *, field: str) -> InvalidRequest:
    """The error for `OPEN` and `UNKNOWN`, whose detail is an index into `rollout_ids`."""
    index = int(refused.detail)
    what = "is not finished; cancel it, or wait" if refused.code == "OPEN" else "was never submitted to this run"
    return InvalidRequest(f"{rollout_ids[index]} {what}", field=f"{field}[{index}]")


def _order_columns(order: SubmitOrder) -> tuple[int, int, int | str, int]:
    return order.sequence, order.settled, "" if order.step is None else order.step, order.first_step


def _score_bytes(request: RolloutRequest) -> int:
    """What the scores of its prompt take; 0 if it is not scored."""
    if request.prompt_logprobs is None:
        return 0
    return record_count(len(request.prompt_ids) // 4, request.prompt_logprobs) * TOKEN_BYTES


def _charge_columns(charge: AccountCharge) -> tuple[str, int, int, int, bytes]:
    held = [tokens for pair in charge.held for tokens in pair]
    rate = charge.tokens_per_minute
    return charge.owner, charge.request_debt, charge.token_debt, rate, msgspec.json.encode(held)


def _accepted(outcome: int, rest: bytes | int) -> AcceptedRollout:
    match SubmitOutcome(outcome):
        case SubmitOutcome.ACCEPTED:
            return AcceptedRollout(SubmitOutcome.ACCEPTED, place=int(rest))
        case SubmitOutcome.KNOWN:
            return AcceptedRollout(SubmitOutcome.KNOWN, state=RolloutState(bytes(rest).decode()))
        case SubmitOutcome.COMPLETED:
            return AcceptedRollout(SubmitOutcome.COMPLETED)


def _placed(request: bytes, prompt: bytes, partial: bytes, attempts: int) -> PlacedRollout:
    whole = msgspec.structs.replace(unpack(request, RolloutRequest), prompt_ids=prompt)
    return PlacedRollout(whole, partial, attempts)


def _open(row: list[bytes | int]) -> OpenRollout:
    place, state, attempt, request, prompt_len, stored, barren, avoid, step = row
    return OpenRollout(
        place=int(place),
        request=unpack(bytes(request), RolloutRequest),
        prompt_len=int(prompt_len),
        state=RolloutState(bytes(state).decode()),
        attempt_id=bytes(attempt).decode(),
        stored=int(stored),
        barren=int(barren),
        avoid=_workers(bytes(avoid)),
        step=int(step),
    )


def _workers(listed: bytes) -> frozenset[str]:
    """The workers of a text with a comma after each name."""
    return frozenset(listed.decode().split(",")[:-1])


_encode = msgspec.json.Encoder().encode


class AppendTopic(Topic):
    async def append(self, deltas: AppendColumns, *, new: bool = False) -> dict[int, AppendAck]:
        """Store new tokens, acknowledge stored ones, refuse gaps and old attempts. Safe to repeat. It costs less
        if they are `new`: all are expected to follow what is stored.

        Returns, by place, the acknowledgements of the deltas that were not stored as sent. Raises `NotFound`.
        """
        # A few large arguments are cheaper than many small ones on both sides.
        finishes = [part for index, reason in deltas.finishes.items() for part in (index + 1, reason.name)]
        columns = _encode((deltas.rollouts, deltas.attempts, deltas.ends, deltas.counts, finishes, new))
        try:
            others = await self._write("append", deltas.run_id, columns, deltas.tokens)
        except LeaseSuperseded:  # the run has ended, and its attempts with it
            return deltas.superseded()
        return {
            place - 1: AppendAck(deltas.attempts[place - 1], AppendStatus(status), stored, bool(finished))
            for place, status, stored, finished in zip(*[iter(others)] * 4, strict=True)
        }


#: Size of one read of a watcher: it bounds memory, and stays well below a message's limit.
PAGE: Final = 64
PAGE_BYTES: Final = 1 << 20
CHUNK_TOKENS: Final = 1 << 16


class TrajectoryTopic(Topic):
    async def finished(self, run_id: str, cursor: str) -> list[FinishedRollout]:
        """A page of finished rollouts after `cursor`, oldest first."""
        rows = await self._run("finished_page", run_id, cursor or "0-0", PAGE, PAGE_BYTES)
        return [_finished(row) for row in rows]

    async def tokens(self, run_id: str, rollout_id: str, offset: int, most: int = CHUNK_TOKENS) -> TokenChunk:
        """Tokens from `offset` on, at most so many, with the finish reason at the end. Raises `NotFound`,
        `InvalidRequest`.
        """
        found = await self._run("read_tokens", run_id, rollout_id, offset, most)
        if not found:
            raise NotFound(f"rollout {rollout_id} is not here: it was never submitted, or is completed and deleted")
        state, reason, stored, tokens, message = found
        if offset > stored:
            raise InvalidRequest(f"{offset} is beyond the {stored} tokens stored", field="offset")
        ended = state.decode() == RolloutState.FINISHED and offset + len(tokens) // 12 == stored
        if not ended:
            return TokenChunk(offset=offset, tokens=tokens)
        return TokenChunk(offset=offset, tokens=tokens, reason=FinishReason[reason.decode()], message=message.decode())

    async def complete(self, lease: LeaseRef, episode: Episode, *, trusted: bool = False) -> list[tuple[str, str]]:
        """End an episode, once. Returns (rollout, attempt) of its rollouts that still ran. Raises `InvalidRequest`.

        `trusted` allows open rollouts: the store may have forgotten that they finished.
        """
        data = pack(episode.trajectory) if episode.trajectory else b""
        try:
            _, *ran = await self._leased(
                "complete", lease, episode.episode_id, episode.drop_reason, data, int(trusted), *episode.rollout_ids
            )
        except StoreRefused as refused:
            if refused.code != "TRAJECTORY":
                raise open_or_unknown(refused, episode.rollout_ids, field="rollout_ids") from None
            what = (
                "give a trajectory or a drop_reason: the episode has training rollouts"
                if refused.detail != "0"
                else "leave it out: the episode has no training rollouts left"
            )
            raise InvalidRequest(what, field="trajectory") from None
        return text_pairs(ran)

    async def page(self, run_id: str, cursor: str) -> list[Trajectory]:
        """A page of durable uncommitted trajectories after `cursor`, in the order of completion."""
        before_ms, least_ms = self._link.durability.before_ms(), round(self._link.durable_after_s * 1000)
        rows = await self._run("trajectory_page", run_id, cursor or "0-0", PAGE, PAGE_BYTES, before_ms, least_ms)
        return [
            msgspec.structs.replace(unpack(data, Trajectory), cursor=entry.decode(), rollouts=int(counted))
            for entry, counted, data in rows
        ]

    async def commit(self, lease: LeaseRef, outcomes: Sequence[TrajectoryOutcome]) -> None:
        """Count each trajectory as trained or dropped and delete it. Those committed before are skipped."""
        await self._leased("commit", lease, *(part for one in outcomes for part in (one.cursor, one.drop_reason)))


def _finished(row: list[bytes]) -> FinishedRollout:
    cursor, request, attempts, reason, message, tokens = row
    asked = unpack(request, RolloutRequest)
    return FinishedRollout(
        cursor=cursor.decode(),
        rollout_id=asked.rollout_id,
        group_id=asked.group_id,
        episode_id=asked.episode_id,
        turn=asked.turn,
        kind=asked.kind,
        reason=FinishReason[reason.decode()],
        tokens=tokens,
        attempts=int(attempts),
        message=message.decode(),
    )
