"""Reads and writes profiles of engines and trainers as TOML files. Others are derived when they are named."""

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.roofline import derived_engine, derived_trainer
from ebbtide.simulator.engines.trainer_profile import TrainerProfile
from ebbtide.types.parse import parse

P = TypeVar("P", EngineProfile, TrainerProfile)

_SUFFIX: Final = ".toml"
_DERIVED: Final[dict[type, Callable[[str], Any]]] = {EngineProfile: derived_engine, TrainerProfile: derived_trainer}


def read_profile(kind: type[P], name: str, *, beside: Path | None = None) -> P:
    """The profile in a file `*.toml`, or the one derived from a name such as `h100x2-qwen3-14b`.

    `beside`: the folder that a relative path starts from. Raises `InvalidRequest` naming the file and the key.
    """
    if not name.endswith(_SUFFIX):
        derived: P = _DERIVED[kind](name)
        return derived
    try:
        table = tomllib.loads(((beside or Path()) / name).read_text(encoding="utf-8"))
        profile = parse(kind, table)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"cannot be read ({error})", field=name) from None
    except InvalidRequest as error:
        raise InvalidRequest(str(error), field=name) from None
    _check_finite(table, name)
    return profile


def write_profile(profile: EngineProfile | TrainerProfile, path: Path) -> None:
    """Writes a file that `read_profile` reads. Raises `InvalidRequest` if it cannot be written."""
    try:
        path.write_text("\n".join(_lines(msgspec.to_builtins(profile), "")) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot be written ({error.strerror})", field=str(path)) from None


def _lines(table: dict[str, Any], name: str) -> list[str]:
    """The table as TOML, plain values first."""
    lines, tables = [f"[{name}]"] if name else [], []
    for key, value in table.items():
        where = f"{name}.{key}" if name else key
        if isinstance(value, dict):
            tables += ["", *_lines(value, where)]
        elif value is not None:
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
