"""Packs and unpacks tokens. They travel from engine to trainer as these bytes and are never re-encoded."""

from typing import Final

import numpy as np
import numpy.typing as npt

from ebbtide.errors import InvalidRequest

#: One sampled token: id, logprob in nats under the sampling distribution, and the policy version that sampled it.
TOKEN: Final = np.dtype([("id", "<u4"), ("logprob", "<f4"), ("version", "<u4")])
TOKEN_BYTES: Final = TOKEN.itemsize

TokenArray = npt.NDArray[np.void]
IdArray = npt.NDArray[np.uint32]


def pack_ids(ids: npt.ArrayLike) -> bytes:
    """Token ids, shape (n,), as little-endian u32."""
    return np.asarray(ids, dtype="<u4").tobytes()


def unpack_ids(data: bytes, *, field: str = "prompt_ids") -> IdArray:
    """The ids in `data`, shape (n,), uint32. Raises `InvalidRequest` if the length is not a multiple of four."""
    if len(data) % 4:
        raise InvalidRequest(f"{len(data)} bytes are not a whole number of little-endian u32 token ids", field=field)
    return np.frombuffer(data, dtype="<u4")


def pack_tokens(ids: npt.ArrayLike, logprobs: npt.ArrayLike, versions: npt.ArrayLike) -> bytes:
    """Sampled tokens as records. Each argument has shape (n,); `versions` may be a scalar."""
    out = np.empty(len(np.asarray(ids)), dtype=TOKEN)
    out["id"], out["logprob"], out["version"] = ids, logprobs, versions
    return out.tobytes()


def unpack_tokens(data: bytes, *, field: str = "tokens") -> TokenArray:
    """The records in `data`, shape (n,), dtype `TOKEN`. Raises `InvalidRequest` if the last record is incomplete."""
    if len(data) % TOKEN_BYTES:
        raise InvalidRequest(f"{len(data)} bytes are not whole token records of {TOKEN_BYTES} bytes", field=field)
    return np.frombuffer(data, dtype=TOKEN)


def token_count(data: bytes) -> int:
    """The number of records in packed tokens."""
    return len(data) // TOKEN_BYTES
