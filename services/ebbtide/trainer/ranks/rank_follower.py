"""Follows rank 0's orders on the other ranks, which talk only to the relay, about their own shares.

Invariant: torch computes in one thread, which lives as long as the process. If rank 0 is gone, this process ends.
"""

import asyncio
from pathlib import Path
from typing import Final

from ebbtide.claimed_runs.run_loop import RankLost
from ebbtide.client import Client
from ebbtide.client.publisher.publisher import Publisher
from ebbtide.client.publisher.torch_exchange import TorchExchange
from ebbtide.errors import EbbtideError
from ebbtide.runtime import Aside, Shutdown, race
from ebbtide.telemetry import bind, get_logger
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.ranks import rank_orders
from ebbtide.trainer.ranks.rank_group import ORDERS_S, answer, renewed
from ebbtide.trainer.ranks.rank_orders import (
    AccumulateOrder,
    BeginOrder,
    GiveUpOrder,
    Order,
    OverOrder,
    PublishOrder,
    RestoreOrder,
    ResumeOrder,
    SaveOrder,
    TrainOrder,
    UpdateOrder,
)
from ebbtide.trainer.ranks.rank_world import RankWorld, computing, exchanging
from ebbtide.trainer.settings import TrainerSettings

log = get_logger(__name__)

#: Time from a request to end until the rank ends by itself; rank 0 gets the request too, and ends all ranks first.
_LEAVE_S: Final = 15.0


async def follow(world: RankWorld, settings: TrainerSettings, shutdown: Shutdown) -> None:
    """Follows rank 0 until it ends. Raises `RankLost` if it is gone."""
    bind(rank=world.rank)
    client = Client(settings.coordinator, settings.relay, security=settings.security, patience_s=settings.patience_s)
    async with client:
        await race(RankFollower(world, client).run(), _asked_to_end(shutdown))


async def _asked_to_end(shutdown: Shutdown) -> None:
    await shutdown.requested.wait()
    if shutdown.failure is None:
        await asyncio.sleep(_LEAVE_S)


class RankFollower:
    def __init__(self, world: RankWorld, client: Client) -> None:
        self._world, self._client, self._thread = world, client, Aside("rank")
        self._orders = TorchExchange(timeout_s=ORDERS_S)
        self._exchange: TorchExchange | None = None
        self._learning: LocalLearning | None = None
        self._publisher: Publisher | None = None

    async def run(self) -> None:
        order: Order | None = None
        while not isinstance(order, OverOrder):
            order = rank_orders.unpack(await self._thread.do(lambda: self._told(b"")))
            failure: EbbtideError | None = None
            if isinstance(order, BeginOrder) and self._publisher is not None:
                await self._publisher.aclose()
                self._publisher = None
            try:
                await self._thread.do(lambda order=order: self._obey(order))  # type: ignore[misc]
            except RankLost:
                raise
            except EbbtideError as error:
                log.warning("an order failed", order=type(order).__name__, reason=str(error))
                failure = error
            await self._thread.do(lambda failure=failure: self._told(answer(failure), back=True))  # type: ignore[misc]
            if isinstance(order, BeginOrder) and self._exchange is not None:
                bind(run_id=order.run_id)
                self._publisher = self._client.publisher(order.run_id, self._exchange, order.spec.policy)
            if isinstance(order, PublishOrder):
                await self._publish()

    def _told(self, data: bytes, *, back: bool = False) -> bytes:
        with exchanging():
            if not back:
                return self._orders.broadcast(data)
            self._orders.gather(data)
            return b""

    def _obey(self, order: Order) -> None:
        self._world.settle()
        with computing():
            match order:
                case BeginOrder():
                    self._begin(order)
                case ResumeOrder():
                    self._own().resume(Path(order.checkpoint), run_id=order.run_id)
                case TrainOrder():
                    samples = rank_orders.unpack_samples(order.samples)
                    self._own().train(samples, step=order.step, version=order.version)
                case AccumulateOrder():
                    self._own().accumulate(rank_orders.unpack_samples(order.samples), version=order.version)
                case UpdateOrder():
                    self._own().update()
                case SaveOrder():
                    self._own().write_part(Path(order.directory))
                case GiveUpOrder():
                    self._own().give_up_memory(order.needed)
                case RestoreOrder():
                    self._own().restore_memory()
                case PublishOrder() | OverOrder():
                    pass  # done after the answer to rank 0

    def _begin(self, order: BeginOrder) -> None:
        self._learning = None  # frees its memory for the next one
        self._exchange = renewed(self._exchange)
        self._learning = LocalLearning(
            order.spec,
            source=Path(order.source),
            device=self._world.device,
            keep_published=order.keep_published,
            world=self._world,
        )

    def _own(self) -> LocalLearning:
        if self._learning is None:
            raise RankLost(f"rank {self._world.rank} has loaded no run: it and rank 0 are out of step")
        return self._learning

    async def _publish(self) -> None:
        """Returns when this rank's share is copied. Rank 0 learns whether the version succeeds."""
        try:
            if self._publisher is not None:
                await self._publisher.publish(self._own().tensors())
        except RankLost:
            raise
        except EbbtideError as error:
            log.warning("this rank's share of a version was not published", reason=str(error))
