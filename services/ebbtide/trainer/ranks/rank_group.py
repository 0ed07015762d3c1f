"""Commands all ranks from rank 0: every action of a training is an order to all, with rank 0's own part.

Invariant: one order runs at a time, also of threads whose tasks were cancelled, and all ranks answer it before the
next. If the run is at fault (`EbbtideError`), the order fails on all ranks, which stay in step; any other error ends
the process of a rank, and so all of them.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from ebbtide.claimed_runs.run_loop import RankLost, RunFailed
from ebbtide.client.publisher.rank_exchange import RankFailure
from ebbtide.client.publisher.torch_exchange import TorchExchange
from ebbtide.errors import EbbtideError
from ebbtide.telemetry import get_logger
from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.learning.step_stats import StepStats
from ebbtide.trainer.learning.training_batches import TrainingSample
from ebbtide.trainer.ranks import rank_orders
from ebbtide.trainer.ranks.rank_world import RankWorld, computing, exchanging
from ebbtide.trainer.training_checkpoint import CheckpointError, TrainingState
from ebbtide.types.run import RunSpec

log = get_logger(__name__)

#: The wait for trajectories between orders has no limit; `ebbtide.trainer.ranks.rank_pulse` notices silent ranks.
ORDERS_S: Final = 30 * 86400.0
#: Time for a running order at the end.
_OVER_S: Final = 5.0


class RankGroup:
    """Gives orders to all ranks. Rank 0 makes one when the ranks have joined."""

    def __init__(self, world: RankWorld) -> None:
        self.world = world
        self._exchange = TorchExchange(timeout_s=ORDERS_S)
        self._lock = threading.Lock()
        self._publishing: TorchExchange | None = None

    @contextmanager
    def order(self, order: rank_orders.Order) -> Iterator[None]:
        """Sends an order to all ranks, runs rank 0's part in the block, and awaits the answers.

        Raises the error of the block or of another rank, and `RankLost`.
        """
        with self._lock:
            self.world.settle()
            self._tell(order)
            own: EbbtideError | None = None
            try:
                with computing():
                    yield
            except RankLost:
                raise
            except EbbtideError as error:
                own = error
            failures = self._answers()
            if own is not None:
                raise own
            if failures:
                raise failures[0]

    def renew(self) -> TorchExchange:
        """Returns the new run's exchange for publishing. This object keeps it, as the run may fail to load."""
        self._publishing = renewed(self._publishing)
        return self._publishing

    def over(self) -> None:
        """Ends the other ranks, if they are still reachable."""
        if not self._lock.acquire(timeout=_OVER_S):
            return
        try:
            self._tell(rank_orders.OverOrder())
            self._answers()
        except RankLost as error:
            log.warning("not all ranks were told of the end", reason=str(error))
        finally:
            self._lock.release()

    def _tell(self, order: rank_orders.Order) -> None:
        with exchanging():
            self._exchange.broadcast(rank_orders.pack(order))

    def _answers(self) -> list[EbbtideError]:
        with exchanging():
            answers = self._exchange.gather(answer(None))
        return [failure for one in answers if (failure := read_answer(one)) is not None]


def renewed(former: TorchExchange | None) -> TorchExchange:
    """Returns a new exchange for publishing a run, which all ranks make as they begin it, and closes the former one.

    An abandoned call may still wait in the former exchange, and would take the new run's messages.
    """
    if former is not None:
        former.close()
    return TorchExchange()


def answer(failure: EbbtideError | None) -> bytes:
    """Encodes a rank's answer to an order."""
    data: bytes = msgspec.msgpack.encode(RankFailure.of(failure) if failure else None)
    return data


def read_answer(data: bytes) -> EbbtideError | None:
    failure: RankFailure | None = msgspec.msgpack.decode(data, type=RankFailure | None)
    own = {kind.__name__: kind for kind in (RunFailed, CheckpointError)}
    if failure is None or failure.kind not in own:
        return failure.error() if failure else None
    return own[failure.kind](failure.text)


class RankZeroLearning(LocalLearning):
    """Learns on all ranks, by orders from rank 0."""

    def __init__(
        self, crew: RankGroup, spec: RunSpec, *, run_id: str, source: Path, keep_published: bool = True
    ) -> None:
        self._crew = crew
        begin = rank_orders.BeginOrder(
            run_id=run_id, spec=spec, source=str(source.absolute()), keep_published=keep_published
        )
        world = crew.world
        with crew.order(begin):
            self._exchange = crew.renew()
            super().__init__(spec, source=source, device=world.device, keep_published=keep_published, world=world)

    def resume(self, path: Path, *, run_id: str) -> TrainingState:
        with self._crew.order(rank_orders.ResumeOrder(checkpoint=str(path.absolute()), run_id=run_id)):
            return super().resume(path, run_id=run_id)

    def train(self, samples: Sequence[TrainingSample], *, step: int, version: int) -> StepStats:
        order = rank_orders.TrainOrder(step=step, version=version, samples=rank_orders.pack_samples(samples))
        with self._crew.order(order):
            return super().train(samples, step=step, version=version)

    def accumulate(self, samples: Sequence[TrainingSample], *, version: int) -> None:
        order = rank_orders.AccumulateOrder(version=version, samples=rank_orders.pack_samples(samples))
        with self._crew.order(order):
            super().accumulate(samples, version=version)

    def update(self) -> StepStats:
        with self._crew.order(rank_orders.UpdateOrder()):
            return super().update()

    def give_up_memory(self, needed: int) -> int:
        with self._crew.order(rank_orders.GiveUpOrder(needed=needed)):
            return super().give_up_memory(needed)

    def restore_memory(self) -> None:
        with self._crew.order(rank_orders.RestoreOrder()):
            super().restore_memory()

    def exchange(self) -> TorchExchange:
        with self._crew.order(rank_orders.PublishOrder()):
            return self._exchange

    def checkpoint(self, folder: Path, state: TrainingState, *, keep: int) -> Path:
        unfinished = training_checkpoint.begin(folder, self._network, self._tokenizer, state)
        tree: Any = None
        with self._crew.order(rank_orders.SaveOrder(directory=str(unfinished.absolute()))):
            tree = super().write_part(unfinished)
        path = training_checkpoint.finish(unfinished, tree, state, self._crew.world.size)
        training_checkpoint.keep_newest(folder, keep)
        return path
