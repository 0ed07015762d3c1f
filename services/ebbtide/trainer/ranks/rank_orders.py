"""Encodes rank 0's orders to the other ranks in msgpack, with packed arrays and without pickle."""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.trainer.learning.training_batches import TrainingSample
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
    """Load a run's weights from the directory `source`, and drop the former run."""

    run_id: str
    spec: RunSpec
    source: str
    keep_published: bool


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


class RestoreOrder(Struct, frozen=True, kw_only=True, tag="Restore"):
    """Bring back what was moved off the device."""


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
    | RestoreOrder
    | OverOrder
)


def pack(order: Order) -> bytes:
    data: bytes = msgspec.msgpack.encode(order)
    return data


def unpack(data: bytes) -> Order:
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
