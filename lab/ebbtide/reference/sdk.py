"""The page about the SDK's calls, from the signatures and docstrings of its classes."""

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Final

from ebbtide.client import Client, GatewayLease, Lease

CLASSES: Final = (Client, Lease, GatewayLease)
_HEAD: Final = """\
# SDK

The calls of `ebbtide.client`, for [a trainer of your own](../guides/own-trainer.md), or a program that submits and
watches runs. `SyncClient` and its leases have the same calls without asyncio, except `acquire`, `unverified`,
`post_verdict` and those of gateways. The exceptions are in [`ebbtide.errors`](../../common/ebbtide/errors.py), and [the
protocol](protocol.md#errors) says what to do about each."""


def calls(owner: type) -> dict[str, Callable[..., Any]]:
    """The public methods of a class and its bases, by name, in the order of their source, those of a base first."""
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(owner.__mro__[:-1]):
        found |= {name: value for name, value in vars(base).items() if inspect.isfunction(value) and name[0] != "_"}
    return found


def page() -> Iterator[str]:
    """Lines of docs/reference/sdk.md."""
    yield from _HEAD.splitlines()
    shown: set[Callable[..., Any]] = set()
    for owner in CLASSES:
        yield from ("", f"## {owner.__name__}", "", *(inspect.getdoc(owner) or "").splitlines(), "")
        mine = calls(owner)
        if repeated := [f"`{name}`" for name, call in mine.items() if call in shown]:
            yield from (f"It also has {', '.join(repeated)}, as above.", "")
        yield from ("| call | what it does |", "|---|---|")
        for name, call in mine.items():
            if call not in shown:
                yield f"| `{_how(call)}{name}{_signature(call)}` | {_text(call)} |"
        shown |= set(mine.values())


def _how(call: Callable[..., Any]) -> str:
    """The keyword with which a caller uses the call."""
    if inspect.iscoroutinefunction(call):
        return "await "
    if inspect.isasyncgenfunction(call):
        return "async for "
    return "async with " if inspect.isasyncgenfunction(inspect.unwrap(call)) else ""


def _signature(call: Callable[..., Any]) -> str:
    """The parameters with their defaults, without their types: docstrings say what they are."""
    shown = []
    for parameter in list(inspect.signature(call).parameters.values())[1:]:
        bare = parameter.replace(annotation=inspect.Parameter.empty)
        if isinstance(bare.default, Enum):
            bare = bare.replace(default=_Name(f"{type(bare.default).__name__}.{bare.default.name}"))
        shown.append(bare)
    return str(inspect.Signature(shown))


class _Name(str):
    """A text that is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _text(call: Callable[..., Any]) -> str:
    return " ".join((inspect.getdoc(call) or "").split()).replace("|", "\\|")
