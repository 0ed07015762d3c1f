"""Reads an append message delta by delta, as fake coordinators do."""

from ebbtide.types.append_delta import AppendDelta
from ebbtide.types.fleet import AttemptRef
from ebbtide.types.tokens import TOKEN_BYTES
from ebbtide.v1 import fleet_pb2
from ebbtide.wire.append_columns import AppendReceiver


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
