"""Reads an append message delta by delta and answers it, as fake coordinators do."""

from collections.abc import Sequence

from ebbtide.append_stream import AppendAck, AppendDelta, AppendReceiver
from ebbtide.types.fleet import AppendStatus, AttemptRef
from ebbtide.types.tokens import TOKEN_BYTES
from ebbtide.v1 import fleet_pb2


def deltas(receiver: AppendReceiver, request: fleet_pb2.AppendRequest) -> list[AppendDelta]:
    """The message's deltas, in their order. Raises `InvalidRequest`."""
    found: dict[int, AppendDelta] = {}
    for places, columns in receiver.columns(request):
        at = 0
        for i, place in enumerate(places):
            ref = AttemptRef(columns.run_id, columns.rollouts[i], columns.attempts[i])
            tokens = columns.tokens[at : at + columns.counts[i] * TOKEN_BYTES]
            found[place] = AppendDelta(ref, columns.ends[i] - columns.counts[i], tokens, columns.finishes.get(i))
            at += len(tokens)
    return [found[place] for place in sorted(found)]


def answer(
    sequence: int, deltas: Sequence[AppendDelta], acks: Sequence[AppendAck], *, durable: bool
) -> fleet_pb2.AppendResponse:
    """The answer to a message of `deltas`; `acks` in their order."""
    others = [
        fleet_pb2.AppendAck(
            index=index,
            status=fleet_pb2.AppendAck.Status.ValueType(ack.status),
            stored=ack.stored,
            finished=ack.finished,
        )
        for index, (delta, ack) in enumerate(zip(deltas, acks, strict=True))
        if ack != _as_sent(delta, ack.message)
    ]
    return fleet_pb2.AppendResponse(sequence=sequence, others=others, durable=durable)


def _as_sent(delta: AppendDelta, message: int) -> AppendAck:
    end = delta.offset + len(delta.tokens) // TOKEN_BYTES
    return AppendAck(delta.ref.attempt_id, AppendStatus.STORED, end, delta.finish is not None, message)
