"""Reads durations as people write them."""

import math
import re
from typing import Final

from ebbtide.errors import InvalidRequest

_UNITS: Final = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FORM: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)", re.ASCII)


def seconds(text: str, *, field: str) -> float:
    """Returns `30`, `30s`, `1.5m`, `500ms` or `1h` in seconds. Raises `InvalidRequest` naming `field`."""
    match = _FORM.fullmatch(text.strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise InvalidRequest(f"{text!r} is no duration: write 30, 30s, 2m or 1h", field=field)
    value = float(match[1]) * unit
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{text!r} leaves no time: give at least a second, such as 30s", field=field)
    return value
