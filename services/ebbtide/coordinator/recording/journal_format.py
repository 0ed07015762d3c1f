"""Defines the file of recorded decisions: a head, then records, each behind its length in 4 bytes (big-endian).

All are MessagePack of `msgspec` structs: JSON has no infinity. Unknown fields are refused by name. A process that was
killed leaves an incomplete last record, which readers pass over. The file has names of runs, rollouts and workers, and
runs' specs, but no prompts and no tokens.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from ebbtide.coordinator.recording import attempt_calls as attempts
from ebbtide.coordinator.recording import round_calls as rounds
from ebbtide.coordinator.recording import run_calls as runs
from ebbtide.coordinator.recording import worker_calls as workers
from ebbtide.errors import InvalidRequest

T = TypeVar("T")
#: Grows when the meaning of records changes.
FORMAT: Final = 1
#: A record of the largest run, whose queue is read again, has some 20 MB.
_MOST_RECORD_BYTES: Final = 64 << 20

Call: TypeAlias = (
    runs.RunAdded
    | runs.RunDropped
    | runs.LoadShed
    | runs.RunPaused
    | runs.StaleSet
    | runs.RunReread
    | runs.Admitted
    | runs.QueuedTaken
    | runs.AttemptMade
    | runs.AttemptStarted
    | runs.PutBack
    | runs.RolloutEnded
    | runs.RolloutFinished
    | runs.FinishesForgotten
    | runs.TokensStored
    | runs.EpisodeForgotten
    | runs.RunDoubted
    | runs.RunReconciled
    | runs.AttemptUnconfirmed
    | runs.AttemptConfirmed
    | runs.UnconfirmedDropped
    | runs.VersionAnnounced
    | runs.InstallNoted
    | runs.ArchitectureNoted
    | runs.MisfitNoted
    | runs.FailedInstallNoted
    | runs.TokensNoted
    | runs.ContextNoted
    | attempts.AttemptBegun
    | attempts.StoredBelieved
    | attempts.AttemptAssigned
    | attempts.AttemptUnassigned
    | attempts.AttemptOrphaned
    | attempts.DueSet
    | attempts.AttemptLeft
    | workers.SessionMade
    | workers.SessionAttached
    | workers.SessionDetached
    | workers.HeartbeatHeard
    | workers.WorkerDrains
    | workers.MessageCame
    | workers.TokensCame
    | workers.MessageAnswered
    | workers.ServingKept
    | workers.VersionInstalled
    | workers.InstallFailureNoted
    | workers.EngineRestarted
    | workers.VersionDistrusted
    | workers.RunBarred
    | workers.ArchitectureRefused
    | workers.ChangeoverNoted
    | workers.WorkerAttached
    | workers.WorkerLeft
    | workers.WorkerLost
    | rounds.RoundsMade
    | rounds.RoundBegun
    | rounds.TurnTaken
    | rounds.BatchPlaced
    | rounds.FillOver
    | rounds.TurnNoted
)


class JournalHead(Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    release: str  # that wrote it


class JournalRecord(Struct, frozen=True, forbid_unknown_fields=True):
    at: float  # seconds on the coordinator's clock when the call was over
    call: Call
    readings: tuple[float, ...] = ()  # of the clock, in the call


_encoder: Final = msgspec.msgpack.Encoder()


def packed(one: JournalHead | JournalRecord) -> bytes:
    data = _encoder.encode(one)
    return len(data).to_bytes(4, "big") + data


def read_journal(path: Path) -> Iterator[tuple[int, JournalRecord]]:
    """The records of a file with their numbers, from 1 on. Raises `InvalidRequest` with the file and the number of what
    is no record (0: the head), or for another format.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        text = f"{path}: cannot be read ({error.strerror}); name a file that record_decisions wrote"
        raise InvalidRequest(text) from None
    with file:
        frames = _frames(file, path)
        head = _decoded(path, 0, next(frames, b""), msgspec.msgpack.Decoder(JournalHead))
        if head.format != FORMAT:
            raise InvalidRequest(
                f"{path}: has format {head.format} of release {head.release}; this release reads format {FORMAT}: "
                "replay it with a release that wrote it"
            )
        decoder = msgspec.msgpack.Decoder(JournalRecord)
        for number, data in enumerate(frames, 1):
            yield number, _decoded(path, number, data, decoder)


def _decoded(path: Path, number: int, data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path}: record {number} is damaged, or no file of record_decisions ({error})") from None


def _frames(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The bytes of each record, but for an incomplete last one."""
    for number in count():
        size = int.from_bytes(head := file.read(4), "big")
        if len(head) < 4:
            return
        if size > _MOST_RECORD_BYTES:
            raise InvalidRequest(
                f"{path}: record {number} would have {size} bytes, more than the {_MOST_RECORD_BYTES} of any: it is "
                "damaged, or no file of record_decisions"
            )
        data = file.read(size)
        if len(data) < size:
            return
        yield data
