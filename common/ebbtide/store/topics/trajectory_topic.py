"""Passes finished rollouts to the driver, and trajectories to the trainer."""

from collections.abc import Sequence
from typing import Final

import msgspec

from ebbtide.errors import InvalidRequest, NotFound
from ebbtide.store.link.store_faults import StoreRefused
from ebbtide.store.record_codec import pack, text_pairs, unpack
from ebbtide.store.rollout_rows import RolloutState
from ebbtide.store.topics.rollout_topic import open_or_unknown
from ebbtide.store.topics.topic import Topic
from ebbtide.types.rollout import (
    Episode,
    FinishedRollout,
    FinishReason,
    RolloutRequest,
    TokenChunk,
    Trajectory,
    TrajectoryOutcome,
)
from ebbtide.types.run import LeaseRef

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

    async def complete(self, lease: LeaseRef, episode: Episode, *, vouched: bool = False) -> list[tuple[str, str]]:
        """End an episode, once. Returns (rollout, attempt) of its rollouts that still ran. Raises `InvalidRequest`.

        `vouched` allows open rollouts: the store may have forgotten that they finished.
        """
        data = pack(episode.trajectory) if episode.trajectory else b""
        try:
            _, *ran = await self._leased(
                "complete", lease, episode.episode_id, episode.drop_reason, data, int(vouched), *episode.rollout_ids
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
