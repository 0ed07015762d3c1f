"""Loads the scripts of `lua/`, each after the constants of `store_keys` and the functions of `lib.lua`."""

import hashlib
from functools import cache
from importlib import resources
from typing import Final

from ebbtide.store.store_keys import lua_constants


class LuaScript:
    """One script's text, and the digest by which a store runs a script that it knows."""

    def __init__(self, name: str, text: str) -> None:
        self.name: Final = name
        self.text: Final = text.encode()
        self.sha: Final = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


@cache
def script(name: str) -> LuaScript:
    """The script `lua/NAME.lua`."""
    folder = resources.files("ebbtide.store") / "lua"
    body = (folder / f"{name}.lua").read_text("utf-8")
    return LuaScript(name, lua_constants() + (folder / "lib.lua").read_text("utf-8") + body)
