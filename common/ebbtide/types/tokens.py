"""Packs and unpacks tokens, and the scores of a prompt. They travel from engine to trainer as these bytes and are never
re-encoded.

The scores of a prompt travel where a rollout's tokens do, in records of the same 12 bytes. The first record names the
whole: the CRC-32 of all that follows it, and the version that scored. Then come the places from the prompt's second
token to the one that was sampled after the prompt. Each has `1 + alternatives` records of `SCORE`: of its token, then
of the most likely tokens, the likeliest first. The last record is the sampled token, as `TOKEN` has it. So a reader
distinguishes a whole from the parts of two.
"""

import struct
import zlib
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ebbtide.errors import InvalidRequest, Unavailable

#: One sampled token: id, logprob in nats under the sampling distribution, and the policy version that sampled it.
TOKEN: Final = np.dtype([("id", "<u4"), ("logprob", "<f4"), ("version", "<u4")])
TOKEN_BYTES: Final = TOKEN.itemsize
_RECORD: Final = struct.Struct("<IfI")
#: Up to so many tokens, which is what an engine delivers together, are packed faster one by one than by numpy.
_FEW: Final = 16

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
    """Sampled tokens as records. Each argument has shape (n,); `versions` may be a scalar. Raises `ValueError` for
    lists of different lengths: no token is lost for want of a logprob or a version."""
    if isinstance(ids, list) and len(ids) <= _FEW and isinstance(logprobs, list) and isinstance(versions, list):
        if not len(ids) == len(logprobs) == len(versions):
            raise ValueError(f"{len(ids)} ids, {len(logprobs)} logprobs and {len(versions)} versions are no tokens")
        with suppress(struct.error, OverflowError):  # beyond 32 bits: numpy decides
            return b"".join(map(_RECORD.pack, ids, logprobs, versions))
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


#: A token at one place: its id, its logprob in nats, and its rank from 1 on. A prompt's tokens are scored under the
#: model's own distribution (temperature 1, nothing cut off), the place behind it under that which was sampled from.
SCORE: Final = np.dtype([("id", "<u4"), ("logprob", "<f4"), ("rank", "<u4")])
#: Records of one prompt, 1.5 MiB: they are sent in one message and stored by one write, so that no half is ever stored.
MAX_RECORDS: Final = 1 << 17

ScoreArray = npt.NDArray[np.void]


class PromptScores(NamedTuple):
    """What one version says of a prompt, and the token that it sampled behind it."""

    #: Shape (tokens of the prompt, 1 + alternatives): of the prompt's tokens but the first, and of the sampled one.
    places: ScoreArray
    token: TokenArray  # shape (1,)

    @property
    def version(self) -> int:
        return int(self.token["version"][0])


def record_count(prompt_tokens: int, alternatives: int) -> int:
    """The number of records that the scores of a prompt have."""
    return prompt_tokens * (1 + alternatives) + 2


def check_records(prompt_tokens: int, alternatives: int, *, field: str) -> None:
    """Raise `InvalidRequest` naming the field for scores that would have more than `MAX_RECORDS` records."""
    if record_count(prompt_tokens, alternatives) > MAX_RECORDS:
        raise InvalidRequest(
            f"{prompt_tokens} tokens with {alternatives} alternatives each have more than {MAX_RECORDS} scores; ask "
            "for fewer alternatives, or score fewer tokens at a time",
            field=field,
        )


def pack_scores(places: ScoreArray, token: bytes) -> bytes:
    """`places` as in `PromptScores`; `token`: the sampled one, packed."""
    rest = places.tobytes() + token
    return pack_tokens([zlib.crc32(rest)], [0.0], unpack_tokens(token)["version"]) + rest


def unpack_scores(data: bytes, prompt_tokens: int, alternatives: int) -> PromptScores:
    """The scores of a prompt of so many tokens. Raises `Unavailable` if these are not all of them, or not of one piece:
    what the store forgets is scored anew.
    """
    if len(data) != record_count(prompt_tokens, alternatives) * TOKEN_BYTES:
        raise Unavailable("the prompt was not scored as a whole; try again")
    head, token = unpack_tokens(data[:TOKEN_BYTES]), unpack_tokens(data[-TOKEN_BYTES:])
    if int(head["id"][0]) != zlib.crc32(memoryview(data)[TOKEN_BYTES:]) or head["version"] != token["version"]:
        raise Unavailable("the prompt was scored anew while its scores were read; try again")
    places = np.frombuffer(data, dtype=SCORE)[1:-1]
    return PromptScores(places.reshape(prompt_tokens, 1 + alternatives), token)


def score_places(ids: npt.ArrayLike, logprobs: npt.ArrayLike, ranks: npt.ArrayLike, alternatives: int) -> ScoreArray:
    """Records of shape (n, 1 + alternatives). Each argument has the scores of all places, one after another."""
    flat = np.empty(len(np.asarray(ids)), dtype=SCORE)
    flat["id"], flat["logprob"], flat["rank"] = ids, logprobs, ranks
    return flat.reshape(-1, 1 + alternatives)
