"""The page about the gRPC contracts, from the comments of the .proto files, the roles and the exceptions."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from ebbtide import errors
from ebbtide.auth import roles
from ebbtide.reference.field_tables import cell, paragraphs
from ebbtide.reference.registered_metrics import ROOT
from ebbtide.rpc.status_table import CODES

PROTOS: Final = ROOT / "protos" / "ebbtide" / "v1"
_HEAD: Final = """# Protocol

For those who write a client or a service. The contracts are `protos/ebbtide/v1/*.proto`, whose comments give
this page and the meaning of every field. `make protos-check`, which is also a test, compares them with those of
the last release (`protos/released/VERSION.binpb`): it reports any field, value or call that was removed,
renumbered, renamed, retyped, or moved into or out of a oneof. To remove a field, reserve its number and name.
"""
_ERRORS: Final = """## Errors

Trailing metadata carries the exception's name, its field and its retry-after (`ebbtide-error`, `ebbtide-field`,
`retry-after-ms`). An exception that is not in this table becomes INTERNAL, with an id that is also in the
service's log.
"""
#: Files in the order of the page.
_FILES: Final = ("runs", "rollouts", "sessions", "fleet", "weights", "grants", "loans")
_CALL: Final = re.compile(r"  rpc (\w+)\((stream )?\w+\) returns \((stream )?\w+\)")


class Call(NamedTuple):
    """A call of a service, with the words of its comment. `streams`: an arrow for each side that streams."""

    name: str
    streams: str
    meaning: str


def page() -> Iterator[str]:
    """Lines of docs/reference/protocol.md."""
    yield from (*_HEAD.splitlines(), "")
    yield from ("## Rules for all calls", "", *_opening("types"), "")
    yield from (*_ERRORS.splitlines(), "", "| status | exception | what to do |", "|---|---|---|")
    for kind in sorted(_exceptions(), key=lambda one: list(CODES).index(_coded(one))):
        yield f"| {CODES[_coded(kind)].name} | `{kind.__name__}` | {cell(' '.join(paragraphs(kind)))} |"
    yield ""
    for name in _FILES:
        source = (PROTOS / f"{name}.proto").read_text()
        (service,) = re.findall(r"^service (\w+) \{", source, re.MULTILINE)
        yield from (f"## {service}", "", *_opening(name), "")
        yield from ("| call | roles | what it does, and its statuses |", "|---|---|---|")
        for call in calls(source):
            table = roles.TABLE[f"/ebbtide.v1.{service}/{call.name}"]
            yield f"| `{call.name}`{call.streams} | {', '.join(sorted(table))} | {cell(call.meaning)} |"
        yield ""


def calls(source: str) -> Iterator[Call]:
    """The calls of the service that a .proto file defines. Raises `ValueError` for one without a comment."""
    above: list[str] = []
    for line in source.splitlines():
        if found := _CALL.match(line):
            if not above:
                raise ValueError(f"say in a comment above it what {found[1]} does")
            arrow = {(False, False): "", (True, False): " ←", (False, True): " →", (True, True): " ↔"}
            yield Call(found[1], arrow[bool(found[2]), bool(found[3])], " ".join(above))
        above = [*above, line.strip().removeprefix("//").strip()] if line.startswith("  //") else []


def _opening(name: str) -> list[str]:
    """The comment at the top of a file."""
    lines = (PROTOS / f"{name}.proto").read_text().split("syntax =")[0].splitlines()
    return [line.removeprefix("//").removeprefix(" ") for line in lines]


def _exceptions() -> list[type[errors.EbbtideError]]:
    known = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EbbtideError)]
    return [kind for kind in known if kind is not errors.EbbtideError]


def _coded(kind: type[errors.EbbtideError]) -> type[errors.EbbtideError]:
    return next(one for one in kind.__mro__ if one in CODES)
