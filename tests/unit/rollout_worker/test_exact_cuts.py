"""A response that was cut, wherever and however often, is the one that it would have been: tokens, logprobs, versions
and end. The model here makes each token from all tokens before it and from what it is asked, as a greedy one does.
"""

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import EngineRequest, TokenDelta
from ebbtide.rollout_worker.generation.generation import Assignment, Generation
from ebbtide.types.fleet import AttemptRef, EngineInfo
from ebbtide.types.rollout import FinishReason
from ebbtide.types.run import Sampling, check_sampling
from ebbtide.types.tokens import pack_ids, token_count, unpack_tokens

EOS, STOP = 1, 2
#: Bytes: letters, and the two that make an e with an accent, so that a character may lie on both sides of a cut.
ALPHABET = (EOS, STOP, *b"abcdef", *"é".encode())
INFO = EngineInfo(model="m", vocab_size=256, max_model_len=56, eos_token_ids=(EOS,))


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


class Model:
    """Greedy: the likeliest token that is allowed, where likelihood is a hash of the text so far."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def next(self, ids: Sequence[int], request: EngineRequest, made: int) -> tuple[int, float]:
        """Penalises tokens of prompt and response alike; no stop token within `min_tokens` of the request."""
        state = zlib.crc32(pack_ids(ids), self._seed)
        scores = {token: zlib.crc32(bytes([token]), state) % 1000 + 1 for token in ALPHABET}
        for token in (EOS, STOP):
            scores[token] //= 3
            if made < request.min_tokens and token in request.stop_token_ids:
                scores[token] = -1
        seen = set(ids)
        best = max(scores, key=lambda token: scores[token] / (request.repetition_penalty if token in seen else 1.0))
        return best, -scores[best] / 1000


def generate(model: Model, generation: Generation, draw: random.Random, version: int, stop_after: int) -> bytes:
    """What an engine makes for this request in bursts, until the response ends or so many tokens were made."""
    request = generation.request()
    ids, tokens, made = list(request.token_ids), b"", 0
    while generation.finish is None and token_count(tokens) < stop_after:
        burst: list[tuple[int, float]] = []
        finish = None
        for _ in range(min(draw.randint(1, 4), stop_after - token_count(tokens))):
            token, logprob = model.next(ids, request, made)
            burst.append((token, logprob))
            ids.append(token)
            made += 1
            if token in request.stop_token_ids and made > request.min_tokens:
                finish = FinishReason.STOP
            elif made == request.max_tokens:
                finish = FinishReason.LENGTH
            if finish is not None:
                break
        made_ids, logprobs = zip(*burst, strict=True)
        tokens += generation.accept(TokenDelta(made_ids, logprobs, [version] * len(burst), finish))
    return tokens


def some_sampling(draw: random.Random) -> Sampling:
    most = draw.randint(1, 80)
    stops = ["ab", "cde", "fa", "é", "dé", "abcabc"]
    return Sampling(
        max_tokens=most,
        min_tokens=draw.choice([0, 0, draw.randint(0, most)]),
        stop=tuple(draw.sample(stops, draw.choice([0, 0, 1, 2]))),
        stop_token_ids=draw.choice([(), (STOP,), (STOP, 300)]),
        ignore_eos=draw.random() < 0.3,
        repetition_penalty=draw.choice([1.0, 1.0, 1.3, 4.0]),
    )


def begin(prompt: Sequence[int], sampling: Sampling, partial: bytes, attempt: int) -> Generation:
    ref = AttemptRef("run", "rollout", f"attempt-{attempt}")
    assignment = Assignment(
        attempt=ref, policy="p", prompt_ids=pack_ids(prompt), partial=partial, sampling=sampling, priority=3
    )
    return Generation(assignment, INFO, decode)


def whole(seed: int, cuts: Sequence[int]) -> tuple[bytes, FinishReason | None, Sampling]:
    """Response `seed`, cut after each of these numbers of tokens (or where it ends)."""
    draw = random.Random(seed)
    sampling, prompt = some_sampling(draw), [draw.choice(ALPHABET[2:]) for _ in range(draw.randint(1, 12))]
    partial, finish = b"", None
    for attempt, upto in enumerate([*sorted(cuts), 1 << 20]):
        generation = begin(prompt, sampling, partial, attempt)
        left = upto - token_count(partial)
        partial += generate(Model(seed), generation, random.Random((seed, attempt).__repr__()), attempt + 1, left)
        finish = generation.finish
    return partial, finish, sampling


def how_it_ended(tokens: bytes, finish: FinishReason | None, sampling: Sampling) -> str:
    ids = unpack_tokens(tokens)["id"].tolist()
    if finish is FinishReason.STOP:
        return "stop token" if ids[-1] in {EOS, STOP} else "stop string"
    return "budget" if len(ids) == sampling.max_tokens else "context"


def test_a_response_cut_anywhere_any_number_of_times_is_the_one_uncut() -> None:
    draw, ends, cut = random.Random(7), Counter[str](), 0
    for seed in range(300):
        tokens, finish, sampling = whole(seed, [])
        length = token_count(tokens)
        ends[how_it_ended(tokens, finish, sampling)] += 1
        for number in (1, 1, 3, 10):
            cuts = [draw.randint(0, length) for _ in range(number)]
            again, finish_again, _ = whole(seed, cuts)
            for column in ("id", "logprob"):
                assert np.array_equal(unpack_tokens(again)[column], unpack_tokens(tokens)[column]), (seed, cuts)
            assert finish_again is finish, (seed, cuts)
            cut += any(0 < one < length for one in cuts)
    assert min(ends[kind] for kind in ("stop token", "stop string", "budget", "context")) >= 10, ends
    assert cut > 600


def test_every_token_keeps_the_version_that_made_it_over_all_cuts() -> None:
    seed = next(seed for seed in range(100) if token_count(whole(seed, [])[0]) > 20)
    length = token_count(whole(seed, [])[0])
    again, _, _ = whole(seed, [3, 3, 7, 11])
    versions = unpack_tokens(again)["version"].tolist()
    assert versions == [1] * 3 + [3] * 4 + [4] * 4 + [5] * (length - 11)


@pytest.mark.parametrize("text", ["é", "dé", "abcabc"])
def test_a_stop_string_is_found_wherever_in_it_the_cut_is(text: str) -> None:
    response = [*b"ffff", *text.encode(), *b"bbbb"]
    end = 4 + len(text.encode())
    for cut in range(len(response)):
        generation = begin([100], Sampling(stop=(text,)), b"", 0)
        stored = generation.accept(TokenDelta(response[:cut], [-1.0] * cut, [1] * cut))
        again = begin([100], Sampling(stop=(text,)), stored, 1)
        if again.finish is None:
            rest = response[token_count(stored) :]
            stored += again.accept(TokenDelta(rest, [-1.0] * len(rest), [1] * len(rest)))
        assert (token_count(stored), again.finish) == (end, FinishReason.STOP), cut


def test_behind_a_cut_the_engine_is_asked_for_the_same_distribution() -> None:
    sampling = Sampling(
        temperature=0.7, top_p=0.9, top_k=5, repetition_penalty=1.3, max_tokens=40, min_tokens=10, stop_token_ids=(2,)
    )
    generation = begin([100, 101], sampling, b"", 0)
    first = generation.request()
    stored = generation.accept(TokenDelta([97] * 6, [-1.0] * 6, [1] * 6))
    again = begin([100, 101], sampling, stored, 0).request()
    changed = {"token_ids": [100, 101] + [97] * 6, "max_tokens": 34, "min_tokens": 4}
    assert again == msgspec.structs.replace(first, **changed)


REFUSED: list[tuple[str, Any]] = [
    ("presence_penalty", 0.5),
    ("frequency_penalty", -0.5),
    ("seed", 0),
    ("seed", 7),
    ("structured_output", '{"type": "object"}'),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_what_could_not_be_continued_exactly_is_refused_by_name(field: str, value: Any) -> None:
    sampling = msgspec.structs.replace(Sampling(), **{field: value})
    with pytest.raises(InvalidRequest, match=f"sampling.{field}: not supported"):
        check_sampling(sampling, field="sampling")
    with pytest.raises(InvalidRequest, match=f"sampling.{field}: not supported"):
        begin([100], sampling, b"", 0)


def test_a_field_of_sampling_that_nobody_thought_of_cannot_slip_through() -> None:
    exact = {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
    }
    exact |= {"repetition_penalty", "without_logprobs"}
    assert set(Sampling.__struct_fields__) == exact | {field for field, _ in REFUSED}
