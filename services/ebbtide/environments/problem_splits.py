"""Assigns a question to a split, by the question's text alone.

Seeds and indices have no influence, so no question of the eval split is ever trained on.
"""

from hashlib import blake2b

from ebbtide.environments import Split

#: One question in five is for evaluation: finding one takes five draws, few enough for slow data sets.
EVAL_SHARE = 0.2
CHECK_SHARE = 0.05


def split_of(question: str) -> Split:
    """Returns the split of `question`; letter case and white space make no difference."""
    place = int.from_bytes(question_key(question), "big") / 2**64
    if place < EVAL_SHARE:
        return "eval"
    return "check" if place < EVAL_SHARE + CHECK_SHARE else "train"


def question_key(question: str) -> bytes:
    """Returns 8 bytes that are equal for questions that differ in letter case and white space alone."""
    return blake2b(" ".join(question.casefold().split()).encode(), digest_size=8).digest()
