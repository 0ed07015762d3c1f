"""Finds the runs that a request is about, and refuses those of other runs than a token's.

A message is about the runs in its fields named `run_id`, at any depth. The fields are found by the contracts'
descriptors, once per type: a new RPC needs no change here.
"""

from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any, Final, Self

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message

from ebbtide.errors import PermissionDenied

_RUN: Final = "run_id"


def runs_named(message: Message) -> Iterator[str]:
    """The run ids that are set in a message, at any depth."""
    for field, value in message.ListFields():
        if not _leads_to_run(field):
            continue
        if field.message_type is None:
            yield value
        elif isinstance(value, Message):
            yield from runs_named(value)
        else:
            for one in value.values() if field.message_type.GetOptions().map_entry else value:
                yield from runs_named(one)


@cache
def can_name_run(method: str) -> bool:
    """Whether requests of a method (`/package.Service/Method`) have a field for a run's id."""
    service, _, name = method.strip("/").partition("/")
    try:
        return _has_run(Default().FindMethodByName(f"{service}.{name}").input_type, frozenset())
    except KeyError:
        return False


class OfOneRun:
    """The requests of a caller whose token is for one run. Raises `PermissionDenied` for a message about another run,
    and if the first message names no run.
    """

    def __init__(self, requests: AsyncIterator[Message], run_id: str) -> None:
        self._requests, self._run_id, self._first = aiter(requests), run_id, True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        message = await anext(self._requests)
        check_run(message, self._run_id, needed=self._first)
        self._first = False
        return message


def check_run(message: Message, run_id: str, *, needed: bool = True) -> None:
    """Raise `PermissionDenied` for a message about another run and, if `needed`, for a message about no run."""
    found = set(runs_named(message))
    if found - {run_id}:
        raise PermissionDenied("the token is for another run than the call; use a token for that run, or for every run")
    if needed and not found:
        raise no_run_named()


def no_run_named() -> PermissionDenied:
    return PermissionDenied(
        "the token is for one run, and the call names none: name the run, or use a token that is not bound to one"
    )


@cache
def _leads_to_run(field: FieldDescriptor) -> bool:
    if field.message_type is None:
        return field.name == _RUN
    return _has_run(field.message_type, frozenset())


def _has_run(kind: Descriptor, above: frozenset[Any]) -> bool:
    if kind.full_name in above:
        return False
    return any(
        field.name == _RUN if field.message_type is None else _has_run(field.message_type, above | {kind.full_name})
        for field in kind.fields
    )
