"""Draws responses that repeat phrases of their group and of their own, as text for drafts.

A response is a stream of phrases: mostly of the group's book, some of the response's own, and now and then a fresh
token. It was fitted to the mean accept lengths that Seer reports by the number of siblings (arXiv 2511.14617, v3, on
sibling references): 1.70, 2.04, 2.32 and 2.53 with 0, 1, 5 and 15. It is no model of language.
"""

from bisect import bisect
from itertools import accumulate
from random import Random
from typing import Final

from msgspec import Struct

_GROUP_PHRASES, _OWN_PHRASES = 3_000, 750
_MEAN_TOKENS: Final = 6.7
#: Probabilities of a fresh token in a phrase's place, and of a phrase of the response's own.
_FRESH, _OWN = 0.15, 0.14
#: Exponent of Zipf's law: the k-th phrase of a book is drawn in proportion to k to the power of minus this.
_ZIPF: Final = 1.04
#: Different tokens. With fewer, short matches are mistaken more often; with these, accept lengths are nearest Seer's.
_VOCABULARY: Final = 1_000


class PhraseBook(Struct, frozen=True):
    """Phrases, and the sums of their weights."""

    phrases: list[list[int]]
    sums: list[float]

    @classmethod
    def drawn(cls, random: Random, count: int) -> "PhraseBook":
        phrases = [_phrase(random) for _ in range(count)]
        return cls(phrases, list(accumulate((number + 1) ** -_ZIPF for number in range(count))))

    def phrase(self, random: Random) -> list[int]:
        return self.phrases[bisect(self.sums, random.random() * self.sums[-1])]


def drawn_group(seed: str, members: int, tokens: int) -> list[list[int]]:
    """Responses of one group, of so many tokens each."""
    random = Random(seed)
    book = PhraseBook.drawn(random, _GROUP_PHRASES)
    return [_response(random, book, tokens) for _ in range(members)]


def _response(random: Random, book: PhraseBook, tokens: int) -> list[int]:
    own, drawn = PhraseBook.drawn(random, _OWN_PHRASES), list[int]()
    while len(drawn) < tokens:
        if random.random() < _FRESH:
            drawn.append(random.randrange(_VOCABULARY))
        else:
            drawn += (own if random.random() < _OWN else book).phrase(random)
    return drawn[:tokens]


def _phrase(random: Random) -> list[int]:
    """Of geometric length."""
    phrase = [random.randrange(_VOCABULARY)]
    while random.random() >= 1.0 / _MEAN_TOKENS:
        phrase.append(random.randrange(_VOCABULARY))
    return phrase
