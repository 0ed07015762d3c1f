"""Submits and cancels rollouts under a lease, in messages that fit."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from ebbtide.client.held_lease import HeldLease
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import NoCapacity, RateLimited
from ebbtide.types.key_usage import MeteredKey
from ebbtide.types.rollout import RolloutRequest, SampledResponse, SubmitOrder, SubmitOutcome, Trajectory
from ebbtide.v1 import rollouts_pb2, runs_pb2
from ebbtide.v1.rollouts_pb2_grpc import RolloutsStub
from ebbtide.wire.record_conversion import to_proto

T = TypeVar("T")
#: Half of a message's 4 MiB, so that ids and framing fit beside the payload.
_BATCH_BYTES: Final = 2 << 20
#: Small enough for the store to take in one script without delaying other calls.
_BATCH_ITEMS: Final = 1024


class RolloutLease(HeldLease):
    """Base of the leases under which rollouts are submitted."""

    def __init__(self, peer: ServicePeer, claimed: runs_pb2.Lease) -> None:
        super().__init__(peer, claimed)
        self._rollouts = RolloutsStub(peer.channel)

    async def submit_rollouts(
        self,
        rollouts: Iterable[RolloutRequest],
        *,
        wait: bool = True,
        step: int | None = None,
        first_step: int = 0,
        key: MeteredKey | None = None,
    ) -> list[SubmitOutcome]:
        """Queue rollouts, idempotent by id; returns an outcome for each, in order.

        With `wait`, waits for room in the queue or quota as long as the lease lasts; otherwise raises `NoCapacity`.
        Raises `InvalidRequest` naming the field, `AlreadyExists` for the id of another rollout.

        `step`: that the rollouts are for, the same whenever they are asked for. `first_step`: no holder submits more
        rollouts of lower steps to the run. Both let a later holder that submits the same ids again learn what is over,
        however long ago that was. Without a step it learns this of the ids that ended last.

        `key`: of a gateway's client, whose account is charged. Raises `RateLimited` or `BudgetSpent` beyond its limits.
        """
        outcomes: list[SubmitOutcome] = []
        for batch in in_batches(rollouts, lambda item: len(item.prompt_ids) + 256):
            request = rollouts_pb2.SubmitRequest(
                lease=self._fence,
                rollouts=[to_proto(item, rollouts_pb2.RolloutRequest) for item in batch],
                key=to_proto(key, rollouts_pb2.MeteredKey) if key else None,
            )
            while True:
                try:
                    answer = await self._submit(request, self._journal.order(step=step, first_step=first_step))
                    break
                except NoCapacity as error:
                    if not wait or isinstance(error, RateLimited):
                        raise
                    await self._pause(error.retry_after_s)
            outcomes.extend(SubmitOutcome(outcome) for outcome in answer.outcomes)
        return outcomes

    async def _submit(self, request: rollouts_pb2.SubmitRequest, order: SubmitOrder) -> rollouts_pb2.SubmitResponse:
        """Submit under a number that no other submit has: what was refused comes again under another one."""
        request.sequence, request.settled, request.first_step = order.sequence, order.settled, order.first_step
        if order.step is not None:
            request.step = order.step
        try:
            return await self._kept(self._rollouts.Submit, request, order.sequence)
        except BaseException:
            self._journal.settle(order.sequence)
            raise

    async def cancel_rollouts(self, rollout_ids: Iterable[str], reason: str = "") -> None:
        """End rollouts in any state; training rollouts count as dropped with `reason` (default "cancelled").
        Requests of gateways finish as they are, and stay readable.
        """
        for batch in in_batches(rollout_ids):
            request = rollouts_pb2.CancelRequest(lease=self._fence, rollout_ids=batch, reason=reason)
            await self._kept(self._rollouts.Cancel, request)


def in_batches(items: Iterable[T], size: Callable[[T], int] = lambda _: 0) -> Iterator[list[T]]:
    """Cut `items`, in order, into lists that fit a message; `size` gives an item's payload in bytes."""
    batch: list[T] = []
    total = 0
    for item in items:
        weight = size(item)
        if batch and (len(batch) >= _BATCH_ITEMS or total + weight > _BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += weight
    if batch:
        yield batch


def trajectory_size(end: Trajectory) -> int:
    """Bytes that a trajectory takes in a message, about."""
    return 256 + len(end.prompt_ids) + len(end.tokens) + len(end.loss_mask) + sum(map(_response_size, end.responses))


def _response_size(one: SampledResponse) -> int:
    return 64 + 5 * len(one.sampling.stop_token_ids)
