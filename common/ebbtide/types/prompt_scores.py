"""Packs and unpacks the scores of a prompt. They travel where a rollout's tokens do, in records of the same 12 bytes.

The first record names the whole: the CRC-32 of all that follows it, and the version that scored. Then come the places
from the prompt's second token to the one that was sampled behind the prompt. Each has `1 + alternatives` records of
`SCORE`: of its token, then of the most likely tokens, the likeliest first. The last record is the sampled token, as
`TOKEN` has it. So a reader tells a whole from the parts of two.
"""

import zlib
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.types.tokens import TOKEN_BYTES, TokenArray, pack_tokens, unpack_tokens

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
