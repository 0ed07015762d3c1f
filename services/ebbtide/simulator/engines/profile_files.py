"""Reads and writes profiles of engines and trainers as TOML files. Some come with the simulator, by their names."""

import math
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.trainer_profile import TrainerProfile
from ebbtide.types.parse import parse

P = TypeVar("P", EngineProfile, TrainerProfile)

_SUFFIX: Final = ".toml"
_FOLDERS: Final[dict[type[Struct], str]] = {EngineProfile: "engines", TrainerProfile: "trainers"}


def read_profile(kind: type[P], name: str, *, beside: Path | None = None) -> P:
    """The profile that comes with the simulator under a name, or the one in a file `*.toml`.

    `beside`: the folder that a relative path starts from. Raises `InvalidRequest` naming the file and the key.
    """
    if not name.endswith(_SUFFIX):
        found: Traversable = _folder(kind) / f"{name}{_SUFFIX}"
        if not found.is_file():
            text = f"no profile of this name comes with the simulator; take one of {', '.join(profile_names(kind))}"
            raise InvalidRequest(f"{text}, or a path that ends with {_SUFFIX}", field=name)
    else:
        found = (beside or Path()) / name
    try:
        table = tomllib.loads(found.read_text(encoding="utf-8"))
        profile = parse(kind, table)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"cannot be read ({error})", field=name) from None
    except InvalidRequest as error:
        raise InvalidRequest(str(error), field=name) from None
    _check_finite(table, name)
    return profile


def profile_names(kind: type[EngineProfile] | type[TrainerProfile]) -> list[str]:
    """Names of the profiles that come with the simulator."""
    return sorted(one.name.removesuffix(_SUFFIX) for one in _folder(kind).iterdir() if one.name.endswith(_SUFFIX))


def write_profile(
    profile: EngineProfile | TrainerProfile, path: Path, notes: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Writes a file that `read_profile` reads. `notes`: comments by the dotted names of fields. Raises `InvalidRequest`
    if it cannot be written."""
    try:
        path.write_text("\n".join(_lines(msgspec.to_builtins(profile), "", notes)) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot be written ({error.strerror})", field=str(path)) from None


def _folder(kind: type[Struct]) -> Traversable:
    return files("ebbtide.simulator.engines").joinpath("profiles", _FOLDERS[kind])


def _lines(table: dict[str, Any], name: str, notes: Mapping[str, str]) -> list[str]:
    """The table as TOML, plain values first."""
    lines, tables = [f"[{name}]"] if name else [], []
    for key, value in table.items():
        where = f"{name}.{key}" if name else key
        if isinstance(value, dict):
            tables += ["", *_lines(value, where, notes)]
        elif value is not None:
            lines += [f"# {notes[where]}"] if where in notes else []
            lines.append(f"{key} = {_value(value)}")
    return lines + tables


def _value(value: str | float | bool) -> str:
    """JSON's form of strings and booleans is TOML's, too; numbers keep six digits, as measurements have no more."""
    if isinstance(value, float):
        text = f"{value:.6g}"
        return text if set(text) & set(".en") else f"{text}.0"
    return msgspec.json.encode(value).decode()


def _check_finite(table: dict[str, Any], name: str, path: str = "") -> None:
    for key, value in table.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            _check_finite(value, name, where)
        elif isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{where}: must be finite", field=name)
