"""Rank 0's side: every deed of a training as an order to all ranks, and rank 0's own part of it.

Invariant: one order is given at a time, also by threads whose tasks were cancelled meanwhile; each is answered by all
ranks before the next. An order that the run is at fault for (`EbbtideError`) fails on all ranks and leaves them in
step; anything else that goes wrong on a rank ends its process, and with it all of them.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from ebbtide.claimed_runs.run_failure import RankLost, RunFailed
from ebbtide.client.publisher.rank_exchange import RankFailure
from ebbtide.client.publisher.torch_exchange import TorchExchange
from ebbtide.errors import EbbtideError, Unavailable
from ebbtide.telemetry import get_logger
from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.learning.learner import StepStats
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.learning.training_batches import TrainingSample
from ebbtide.trainer.ranks import rank_orders
from ebbtide.trainer.ranks.rank_world import RankWorld, first_line, is_lost
from ebbtide.trainer.training_checkpoint import CheckpointError, TrainingState
from ebbtide.types.run import RunSpec

log = get_logger(__name__)

#: Between orders lies the wait for trajectories, however long: silence is `ebbtide.trainer.ranks.rank_pulse`'s to
#: notice.
ORDERS_S: Final = 30 * 86400.0
#: At the end, for an order under way.
_OVER_S: Final = 5.0


class RankGroup:
    """Made once, on rank 0, when the ranks have come together."""

    def __init__(self, world: RankWorld) -> None:
        self.world = world
        self._exchange = TorchExchange(timeout_s=ORDERS_S)
        self._lock = threading.Lock()
        self._publishing: TorchExchange | None = None

    @contextmanager
    def order(self, order: rank_orders.Order) -> Iterator[None]:
        """Tell all ranks, do rank 0's part in the block, and hear how the others fared.

        Raises what the block or another rank met, and `RankLost`.
        """
        with self._lock:
            self.world.settle()
            self._tell(order)
            own: EbbtideError | None = None
            try:
                yield
            except RankLost:
                raise
            except EbbtideError as error:
                own = error
            except RuntimeError as error:
                if is_lost(error):
                    raise RankLost(f"another rank is gone ({first_line(error)})") from None
                raise
            failures = self._answers()
            if own is not None:
                raise own
            if failures:
                raise failures[0]

    def renew(self) -> TorchExchange:
        """What the run that is begun publishes over. Held here: of a run that fails to load, nobody holds it."""
        self._publishing = renewed(self._publishing)
        return self._publishing

    def over(self) -> None:
        """Have the other ranks end, if they can still be told."""
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
        try:
            self._exchange.broadcast(rank_orders.pack(order))
        except Unavailable as error:
            raise RankLost(str(error)) from None

    def _answers(self) -> list[EbbtideError]:
        try:
            answers = self._exchange.gather(answer(None))
        except Unavailable as error:
            raise RankLost(str(error)) from None
        return [failure for one in answers if (failure := read_answer(one)) is not None]


def renewed(former: TorchExchange | None) -> TorchExchange:
    """What all ranks publish a run over, made as they begin it; the former run's is closed.

    Not that one again: a call of a version that was given up may wait in it yet, and would take the new run's messages.
    """
    if former is not None:
        former.close()
    return TorchExchange()


def answer(failure: EbbtideError | None) -> bytes:
    """How a rank fared with an order."""
    data: bytes = msgspec.msgpack.encode(RankFailure.of(failure) if failure else None)
    return data


def read_answer(data: bytes) -> EbbtideError | None:
    failure: RankFailure | None = msgspec.msgpack.decode(data, type=RankFailure | None)
    own = {kind.__name__: kind for kind in (RunFailed, CheckpointError)}
    if failure is None or failure.kind not in own:
        return failure.error() if failure else None
    return own[failure.kind](failure.text)


class RankZeroLearning(LocalLearning):
    """A `LocalLearning` on all ranks, as rank 0 has it."""

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
