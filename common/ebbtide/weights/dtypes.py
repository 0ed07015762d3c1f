"""Names the dtypes that weights may have, as safetensors does, and the numpy types that carry their bits.

numpy has neither bfloat16 nor the 8-bit floats: unsigned integers of the same width carry their bits.
"""

from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ebbtide.errors import InvalidRequest

#: safetensors' name -> little-endian numpy type of the same width, and the name in torch, numpy and ml_dtypes.
_DTYPES: Final = {
    "BOOL": ("|b1", "bool"),
    "U8": ("|u1", "uint8"),
    "I8": ("|i1", "int8"),
    "F8_E4M3": ("|u1", "float8_e4m3fn"),
    "F8_E5M2": ("|u1", "float8_e5m2"),
    "F8_E8M0": ("|u1", "float8_e8m0fnu"),
    "U16": ("<u2", "uint16"),
    "I16": ("<i2", "int16"),
    "F16": ("<f2", "float16"),
    "BF16": ("<u2", "bfloat16"),
    "U32": ("<u4", "uint32"),
    "I32": ("<i4", "int32"),
    "F32": ("<f4", "float32"),
    "U64": ("<u8", "uint64"),
    "I64": ("<i8", "int64"),
    "F64": ("<f8", "float64"),
}
#: safetensors' name -> little-endian numpy type of the same width.
CARRIERS: Final = MappingProxyType({name: np.dtype(bits) for name, (bits, _) in _DTYPES.items()})
_NAMES: Final = {spelling: name for name, (_, spelling) in _DTYPES.items()}


def carrier(dtype: str, *, field: str = "dtype") -> np.dtype[Any]:
    """Return the numpy type that carries `dtype`. Raises `InvalidRequest` naming `field` for an unknown dtype."""
    if (found := CARRIERS.get(dtype)) is None:
        raise InvalidRequest(f"{dtype[:32]!r} is none of {', '.join(CARRIERS)}", field=field)
    return found


def dtype_name(spelling: str, *, field: str = "dtype") -> str:
    """Return safetensors' name of a type that numpy or torch prints so (`torch.bfloat16`). Raises `InvalidRequest`."""
    if (name := _NAMES.get(spelling.removeprefix("torch."))) is None:
        raise InvalidRequest(f"weights of type {spelling} cannot be published; cast them first", field=field)
    return name
