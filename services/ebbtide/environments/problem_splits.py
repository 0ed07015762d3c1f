"""Which split a question belongs to: decided by the question's text alone.

No seed and no index enter, so a question of the eval split is never trained on, whatever the seed of the base model, of
the run or of the evaluation, and however many questions share a prompt.
"""

from hashlib import blake2b

from ebbtide.environments import Split

#: One question in five is kept for evaluation: finding one then costs five draws, which also slow data sets can pay.
EVAL_SHARE = 0.2
CHECK_SHARE = 0.05


def split_of(question: str) -> Split:
    """The split of `question`; letter case and white space make no difference."""
    normal = " ".join(question.casefold().split())
    place = int.from_bytes(blake2b(normal.encode(), digest_size=8).digest(), "big") / 2**64
    if place < EVAL_SHARE:
        return "eval"
    return "check" if place < EVAL_SHARE + CHECK_SHARE else "train"
