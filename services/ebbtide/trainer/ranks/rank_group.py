"""Commands all ranks from rank 0: every action of a training is an order to all, with rank 0's own part.

Invariant: one order runs at a time, also of threads whose tasks were cancelled, and all ranks answer it before the
next. If the run is at fault (`EbbtideError`), the order fails on all ranks, which stay in step; any other error ends
the process of a rank, and so all of them.
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from safetensors import SafetensorError

from ebbtide.client import Client
from ebbtide.client.publisher.publisher import Publisher
from ebbtide.client.publisher.rank_exchange import RankFailure
from ebbtide.client.publisher.torch_exchange import TorchExchange
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.hub_models import same_folder
from ebbtide.run_client import RunFailed
from ebbtide.runtime import Aside, Shutdown, race
from ebbtide.telemetry import bind, get_logger
from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.learning.grpo import StepStats
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.learning.out_of_memory import OutOfMemory
from ebbtide.trainer.learning.parked_state import Parked, StatePark, park_of
from ebbtide.trainer.learning.training_batches import TrainingSample
from ebbtide.trainer.ranks.rank_launcher import RankLost
from ebbtide.trainer.ranks.rank_world import OtherRankFailed, RankWorld, computing, exchanging
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.trainer.training_checkpoint import CheckpointError, CheckpointPart, Store, TrainingState
from ebbtide.types.rollout import SampledResponse
from ebbtide.types.run import RunSpec


class PackedSamples(Struct, frozen=True, kw_only=True):
    """A step's samples, concatenated; little-endian."""

    lengths: tuple[int, ...]  # ids of each sample
    tails: tuple[int, ...]  # ids after each sample's prompt
    ids: bytes  # int64
    mask: bytes  # bytes 0 and 1
    logprobs: bytes  # float32
    versions: bytes  # int64
    advantages: bytes  # float64
    responses: tuple[tuple[SampledResponse, ...], ...]  # of each sample


class BeginOrder(Struct, frozen=True, kw_only=True, tag="Begin"):
    """Load a run's weights from the directory `source` of rank 0's host, and drop the former run."""

    run_id: str
    spec: RunSpec
    source: str
    keep_published: bool
    offload: bool = False
    parks: bool = False  # the state leaves the device between turns


class ResumeOrder(Struct, frozen=True, kw_only=True, tag="Resume"):
    """Read the optimiser's state of a checkpoint."""

    checkpoint: str
    run_id: str


class TrainOrder(Struct, frozen=True, kw_only=True, tag="Train"):
    step: int
    version: int
    samples: PackedSamples


class AccumulateOrder(Struct, frozen=True, kw_only=True, tag="Accumulate"):
    """Add the gradient of some samples of a step."""

    version: int
    samples: PackedSamples


class UpdateOrder(Struct, frozen=True, kw_only=True, tag="Update"):
    """Take an optimiser step on what was accumulated."""


class PublishOrder(Struct, frozen=True, kw_only=True, tag="Publish"):
    """Publish the weights as they are now, together with rank 0."""


class SaveOrder(Struct, frozen=True, kw_only=True, tag="Save"):
    """Write this rank's part of a checkpoint into `directory`."""

    directory: str


class GiveUpOrder(Struct, frozen=True, kw_only=True, tag="GiveUp"):
    """Make room on the device for an engine that needs so many bytes."""

    needed: int


class LeaveOrder(Struct, frozen=True, kw_only=True, tag="Leave"):
    """Move the whole state off the device, for another trainer's turn."""


class RestoreOrder(Struct, frozen=True, kw_only=True, tag="Restore"):
    """Bring back what was moved off the device."""


class ForgetOrder(Struct, frozen=True, kw_only=True, tag="Forget"):
    """Free what was parked, of a run that is over."""


class OverOrder(Struct, frozen=True, kw_only=True, tag="Over"):
    """Rank 0 ends."""


Order: TypeAlias = (
    BeginOrder
    | ResumeOrder
    | TrainOrder
    | AccumulateOrder
    | UpdateOrder
    | PublishOrder
    | SaveOrder
    | GiveUpOrder
    | LeaveOrder
    | RestoreOrder
    | ForgetOrder
    | OverOrder
)


def pack_order(order: Order) -> bytes:
    data: bytes = msgspec.msgpack.encode(order)
    return data


def unpack_order(data: bytes) -> Order:
    """Raises `InvalidRequest` unless the bytes are an order."""
    try:
        order: Order = msgspec.msgpack.decode(data, type=Order)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"no order came from rank 0 ({error}); restart all ranks", field="ranks") from None
    return order


def pack_samples(samples: Sequence[TrainingSample]) -> PackedSamples:
    def joined(arrays: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.generic]]], dtype: str) -> bytes:
        return b"".join(array.astype(dtype).tobytes() for array in arrays)

    return PackedSamples(
        lengths=tuple(len(sample.ids) for sample in samples),
        tails=tuple(len(sample.mask) for sample in samples),
        ids=joined([sample.ids for sample in samples], "<i8"),
        mask=joined([sample.mask for sample in samples], "|u1"),
        logprobs=joined([sample.logprobs for sample in samples], "<f4"),
        versions=joined([sample.versions for sample in samples], "<i8"),
        advantages=np.array([sample.advantage for sample in samples], "<f8").tobytes(),
        responses=tuple(sample.responses for sample in samples),
    )


def unpack_samples(packed: PackedSamples) -> list[TrainingSample]:
    """Raises `InvalidRequest` if lengths and arrays do not agree."""
    tails, count = sum(packed.tails), len(packed.lengths)
    sizes = (8 * sum(packed.lengths), tails, 4 * tails, 8 * tails, 8 * count)
    arrays = (packed.ids, packed.mask, packed.logprobs, packed.versions, packed.advantages)
    if not len(packed.tails) == len(packed.responses) == count or tuple(map(len, arrays)) != sizes:
        raise InvalidRequest("have arrays whose lengths do not match", field="samples")
    ids = np.split(np.frombuffer(packed.ids, "<i8"), np.cumsum(packed.lengths)[:-1])
    ends = np.cumsum(packed.tails)[:-1]
    masks = np.split(np.frombuffer(packed.mask, np.uint8) == 1, ends)
    logprobs = np.split(np.frombuffer(packed.logprobs, "<f4"), ends)
    versions = np.split(np.frombuffer(packed.versions, "<i8"), ends)
    advantages = np.frombuffer(packed.advantages, "<f8").tolist()
    parts = zip(ids, masks, logprobs, versions, advantages, packed.responses, strict=True) if count else ()
    return [TrainingSample(*part) for part in parts]


log = get_logger(__name__)

#: The wait for trajectories between orders has no limit; `ebbtide.trainer.ranks.rank_world` notices silent ranks.
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
        self._in_step = True

    @contextmanager
    def order(self, order: Order) -> Iterator[None]:
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
            except OutOfMemory:  # the others may wait in a collective, and do not answer
                self._in_step = False
                raise
            except RankLost:
                raise
            except EbbtideError as error:
                own = error
            failures = [one for one in (own, *self._answers()) if one is not None]
            if failures:  # that of the rank at fault first
                raise min(failures, key=lambda one: isinstance(one, OtherRankFailed))

    def renew(self) -> TorchExchange:
        """Returns the new run's exchange for publishing. This object keeps it, as the run may fail to load."""
        self._publishing = renewed(self._publishing)
        return self._publishing

    def over(self) -> None:
        """Ends the other ranks, if they are in step and still reachable."""
        if not self._in_step or not self._lock.acquire(timeout=_OVER_S):
            return
        try:
            self._tell(OverOrder())
            self._answers()
        except RankLost as error:
            log.warning("not all ranks were told of the end", reason=str(error))
        finally:
            self._lock.release()

    def _tell(self, order: Order) -> None:
        with exchanging():
            self._exchange.broadcast(pack_order(order))

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
    own = {kind.__name__: kind for kind in (RunFailed, CheckpointError, OtherRankFailed)}
    if failure is None or failure.kind not in own:
        return failure.error() if failure else None
    return own[failure.kind](failure.text)


class RankZeroLearning(LocalLearning):
    """Learns on all ranks, by orders from rank 0."""

    def __init__(
        self,
        crew: RankGroup,
        spec: RunSpec,
        *,
        run_id: str,
        source: Path,
        keep_published: bool = True,
        offload: bool = False,
        park: StatePark | None = None,
    ) -> None:
        self._crew = crew
        settings: dict[str, Any] = {"keep_published": keep_published, "offload": offload}
        parks = park is not None
        begin = BeginOrder(run_id=run_id, spec=spec, source=str(source.absolute()), parks=parks, **settings)
        world = crew.world
        with crew.order(begin):
            self._exchange = crew.renew()
            super().__init__(spec, source=source, device=world.device, world=world, park=park, **settings)

    def resume(self, path: Path, *, run_id: str) -> TrainingState:
        with self._crew.order(ResumeOrder(checkpoint=str(path.absolute()), run_id=run_id)):
            return super().resume(path, run_id=run_id)

    def train(self, samples: Sequence[TrainingSample], *, step: int, version: int) -> StepStats:
        order = TrainOrder(step=step, version=version, samples=pack_samples(samples))
        with self._crew.order(order):
            return super().train(samples, step=step, version=version)

    def accumulate(self, samples: Sequence[TrainingSample], *, version: int) -> None:
        order = AccumulateOrder(version=version, samples=pack_samples(samples))
        with self._crew.order(order):
            super().accumulate(samples, version=version)

    def update(self) -> StepStats:
        with self._crew.order(UpdateOrder()):
            return super().update()

    def give_up_memory(self, needed: int) -> int:
        with self._crew.order(GiveUpOrder(needed=needed)):
            return super().give_up_memory(needed)

    def leave_device(self) -> Parked:
        with self._crew.order(LeaveOrder()):
            return super().leave_device()

    def restore_memory(self) -> None:
        with self._crew.order(RestoreOrder()):
            super().restore_memory()

    def forget_parked(self) -> None:
        with self._crew.order(ForgetOrder()):
            super().forget_parked()

    def exchange(self) -> TorchExchange:
        with self._crew.order(PublishOrder()):
            return self._exchange

    def begin_checkpoint(self, folder: Path, state: TrainingState, *, keep: int) -> Store:
        unfinished = training_checkpoint.begin(folder, self._network, self._tokenizer, state)
        parts: list[CheckpointPart] = []
        with self._crew.order(SaveOrder(directory=str(unfinished.absolute()))):
            parts.append(super().begin_part(unfinished))
        random_state, ranks = training_checkpoint.read_random_state(), self._crew.world.size

        def store() -> Path:
            parts[0].store()
            path = training_checkpoint.finish(unfinished, parts[0].tree, random_state, state, ranks)
            training_checkpoint.keep_newest(folder, keep)
            return path

        return store


# Follows rank 0's orders on the other ranks, which talk only to the relay, about their own shares.
#
# Invariant: torch computes in one thread, which lives as long as the process. If rank 0 is gone, this process ends.

#: Time from a request to end until the rank ends by itself; rank 0 gets the request too, and ends all ranks first.
_LEAVE_S: Final = 15.0


async def follow(world: RankWorld, settings: TrainerSettings, shutdown: Shutdown) -> None:
    """Follows rank 0 until it ends. Raises `RankLost` if it is gone."""
    bind(rank=world.rank)
    client = Client(settings.coordinator, settings.relay, security=settings.security, patience_s=settings.patience_s)
    async with client:
        await race(RankFollower(world, client, settings).run(), _asked_to_end(shutdown))


async def _asked_to_end(shutdown: Shutdown) -> None:
    await shutdown.requested.wait()
    if shutdown.failure is None:
        await asyncio.sleep(_LEAVE_S)


class RankFollower:
    def __init__(self, world: RankWorld, client: Client, settings: TrainerSettings | None = None) -> None:
        """`settings`: say where states are parked, for runs that take turns."""
        self._world, self._client, self._thread = world, client, Aside("rank")
        self._settings = settings
        self._orders = TorchExchange(timeout_s=ORDERS_S)
        self._exchange: TorchExchange | None = None
        self._learning: LocalLearning | None = None
        self._part: CheckpointPart | None = None  # of a checkpoint, to be stored
        self._storing = Aside("rank checkpoint")
        self._publisher: Publisher | None = None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as stores:
            await self._follow(stores)

    async def _follow(self, stores: asyncio.TaskGroup) -> None:
        order: Order | None = None
        while not isinstance(order, OverOrder):
            order = unpack_order(await self._thread.do(lambda: self._told(b"")))
            failure: EbbtideError | None = None
            if isinstance(order, BeginOrder) and self._publisher is not None:
                await self._publisher.aclose()
                self._publisher = None
            try:
                await self._thread.do(lambda order=order: self._obey(order))  # type: ignore[misc]
            except (RankLost, OutOfMemory):
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
            if self._part is not None:
                stores.create_task(self._store(self._part))
                self._part = None

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
                    samples = unpack_samples(order.samples)
                    self._own().train(samples, step=order.step, version=order.version)
                case AccumulateOrder():
                    self._own().accumulate(unpack_samples(order.samples), version=order.version)
                case UpdateOrder():
                    self._own().update()
                case SaveOrder():
                    self._part = self._own().begin_part(Path(order.directory))
                case GiveUpOrder() | LeaveOrder() | RestoreOrder() | ForgetOrder():
                    self._move(order)
                case PublishOrder() | OverOrder():
                    pass  # done after the answer to rank 0

    def _move(self, order: GiveUpOrder | LeaveOrder | RestoreOrder | ForgetOrder) -> None:
        match order:
            case GiveUpOrder():
                self._own().give_up_memory(order.needed)
            case LeaveOrder():
                self._own().leave_device()
            case RestoreOrder():
                self._own().restore_memory()
            case ForgetOrder():
                self._own().forget_parked()

    def _begin(self, order: BeginOrder) -> None:
        self._learning = None  # frees its memory for the next one
        self._exchange = renewed(self._exchange)
        park = park_of(self._settings) if order.parks and self._settings is not None else None
        self._learning = LocalLearning(
            order.spec,
            source=same_folder(Path(order.source), order.spec.model),
            device=self._world.device,
            keep_published=order.keep_published,
            offload=order.offload,
            world=self._world,
            park=park,
        )

    async def _store(self, part: CheckpointPart) -> None:
        """Writes the part of a checkpoint beside the next orders. If that fails this rank ends, as rank 0 waits."""
        try:
            await self._storing.do(part.store)
        except (OSError, SafetensorError):
            if part.wanted:
                raise
            log.warning("a later trainer of the run has removed a checkpoint that was being written")

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
        if (full := self._own().ran_out) is not None:
            raise full
