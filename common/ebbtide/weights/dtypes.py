"""The dtypes that weights may have, by safetensors' names, and the numpy types that carry their bits.

numpy knows neither bfloat16 nor the 8-bit floats: their bits travel in unsigned integers of the same width.
"""

from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ebbtide.errors import InvalidRequest

#: safetensors' name -> little-endian numpy type of the same width.
CARRIERS: Final = MappingProxyType(
    {
        name: np.dtype(carrier)
        for name, carrier in {
            "BOOL": "|b1",
            "U8": "|u1",
            "I8": "|i1",
            "F8_E4M3": "|u1",
            "F8_E5M2": "|u1",
            "F8_E8M0": "|u1",
            "U16": "<u2",
            "I16": "<i2",
            "F16": "<f2",
            "BF16": "<u2",
            "U32": "<u4",
            "I32": "<i4",
            "F32": "<f4",
            "U64": "<u8",
            "I64": "<i8",
            "F64": "<f8",
        }.items()
    }
)

# torch, numpy and ml_dtypes spell their types alike; what safetensors calls each of them.
_NAMES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}


def carrier(dtype: str, *, field: str = "dtype") -> np.dtype[Any]:
    """The numpy type that carries `dtype`. Raises `InvalidRequest` naming `field` if there is none."""
    if (found := CARRIERS.get(dtype)) is None:
        raise InvalidRequest(f"{dtype[:32]!r} is none of {', '.join(CARRIERS)}", field=field)
    return found


def dtype_name(spelling: str, *, field: str = "dtype") -> str:
    """safetensors' name for a type as numpy or torch prints it (`torch.bfloat16`). Raises `InvalidRequest`."""
    if (name := _NAMES.get(spelling.removeprefix("torch."))) is None:
        raise InvalidRequest(f"weights of type {spelling} cannot be published; cast them first", field=field)
    return name
