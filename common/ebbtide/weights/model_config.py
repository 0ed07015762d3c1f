"""Checks the model configuration that travels with a version, from which workers start an engine.

The configuration is only data: keys that make a loader import or run code are refused at any depth.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import CONFIG_BYTES

#: Keys that make a loader run code from the checkpoint.
_CODE: Final = frozenset({"auto_map", "custom_pipelines", "trust_remote_code"})
#: Hugging Face's names of model families and of model classes.
_TYPE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CLASS: Final = re.compile(r"[A-Za-z0-9_]{1,96}")
_CLASSES: Final = 8
#: Known models nest their parts less deeply.
_DEPTH: Final = 8


def check_config(config: bytes) -> dict[str, Any]:
    """Decode a configuration. Raises `InvalidRequest` if it is malformed, too large or brings code."""
    if len(config) > CONFIG_BYTES:
        raise InvalidRequest(f"has {len(config)} bytes; at most {CONFIG_BYTES}", field="config")
    try:
        found = msgspec.json.decode(config)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"is not JSON: {error}", field="config") from None
    if not isinstance(found, dict):
        raise InvalidRequest("must be a JSON object, as config.json is", field="config")
    classes = found.get("architectures")
    if (
        not isinstance(classes, list)
        or not 1 <= len(classes) <= _CLASSES
        or not all(_is(_CLASS, one) for one in classes)
    ):
        raise InvalidRequest("must name the model's classes", field="config.architectures")
    if not _is(_TYPE, found.get("model_type")):
        raise InvalidRequest("must name the model's family", field="config.model_type")
    _refuse_code(found, "config", _DEPTH)
    return found


def read_config(model: Path) -> bytes:
    """Read a checkpoint directory's configuration, with the end-of-sequence tokens of its generation_config.json.

    Empty if there is none. Raises `InvalidRequest` for a configuration that is refused, `OSError` for unreadable files.
    """
    path = model / "config.json"
    if not path.is_file():
        return b""
    config = check_config(path.read_bytes())
    if len(ends := end_tokens(model)) > 1:
        config["eos_token_id"] = ends
    return msgspec.json.encode(config, order="deterministic")


def end_tokens(model: Path) -> tuple[int, ...]:
    """Read the end-of-sequence token ids that a checkpoint directory's config.json and generation_config.json name.

    They are sorted. Raises `InvalidRequest` for a file that is not JSON, `OSError` for unreadable files.
    """
    config = _decode(model / "config.json")
    parts = (config, config.get("text_config"), _decode(model / "generation_config.json"))
    found: set[int] = set()
    for part in parts:
        value = part.get("eos_token_id") if isinstance(part, Mapping) else None
        found.update(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))
    return tuple(sorted(found))


def _decode(path: Path) -> Mapping[str, Any]:
    """Read a JSON file. Empty if there is none, or it holds no object."""
    if not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", field="model") from None
    return found if isinstance(found, Mapping) else {}


def _is(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _refuse_code(value: Any, field: str, depth: int) -> None:
    if not isinstance(value, dict | list):
        return
    if not depth:
        raise InvalidRequest("is nested too deeply", field=field)
    if isinstance(value, list):
        for inner in value:
            _refuse_code(inner, field, depth - 1)
        return
    for key, inner in value.items():
        if key in _CODE:
            raise InvalidRequest("brings code of its own, which is never run; leave it out", field=f"{field}.{key}")
        _refuse_code(inner, f"{field}.{key}", depth - 1)
