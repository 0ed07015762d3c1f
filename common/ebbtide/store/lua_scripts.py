"""Loads the scripts of `lua/`, each after those constants of `store_keys` and parts of `lib.lua` that it uses.

A store evaluates a script from its first line at each call, so a part that is not used would cost each call its share.
"""

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

from ebbtide.store.store_keys import lua_constants

_COMMENT: Final = re.compile(r"--.*")
_WORD: Final = re.compile(r"\w+")
#: A part begins with a local at the beginning of a line, and declares the names behind it.
_DECLARATION: Final = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)


class LuaScript:
    """One script's text, and the digest by which a store runs a script that it knows."""

    def __init__(self, name: str, text: str) -> None:
        self.name: Final = name
        self.text: Final = text.encode()
        self.sha: Final = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


class _Part(NamedTuple):
    names: frozenset[str]  # that it declares
    words: frozenset[str]  # in it: what it uses is among them
    text: str


@cache
def script(name: str) -> LuaScript:
    """The script `lua/NAME.lua`."""
    body = _read(name)
    return LuaScript(name, _used(_words(body)) + body)


def _used(words: frozenset[str]) -> str:
    """The parts that something with these words uses, in their order. Parts use only what stands before them."""
    used: list[_Part] = []
    for part in reversed(_parts()):
        if part.names & words:
            used.append(part)
            words |= part.words
    return "".join(part.text for part in reversed(used))


@cache
def _parts() -> list[_Part]:
    return list(_split(lua_constants() + _read("lib")))


def _split(text: str) -> Iterator[_Part]:
    found = list(_DECLARATION.finditer(text))
    ends = [one.start() for one in found[1:]] + [len(text)]
    for one, end in zip(found, ends, strict=True):
        part = text[one.start() : end]
        yield _Part(frozenset(one[1].split(", ")), _words(part), part)


def _words(text: str) -> frozenset[str]:
    """Names in a text, without its comments; words of its strings are among them, which does no harm."""
    return frozenset(_WORD.findall(_COMMENT.sub("", text)))


def _read(name: str) -> str:
    return (resources.files("ebbtide.store") / "lua" / f"{name}.lua").read_text("utf-8")
