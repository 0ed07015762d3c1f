"""The Lua scripts: each file of `lua/` behind the names of `keys` and the shared functions of `lib.lua`."""

import hashlib
from functools import cache
from importlib import resources
from typing import Final

from ebbtide.store.store_keys import lua_constants


class LuaScript:
    """One script's text and its digest, by which a store that has seen it before runs it."""

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
