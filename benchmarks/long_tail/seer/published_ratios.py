"""What Seer published of its policies (arXiv 2511.14617 v3, OSDI'26), beside veRL on the same engines."""

from typing import Final, NamedTuple

from msgspec import Struct

#: Throughput of Seer over veRL, by model and samples of a group.
SEER_OVER_VERL: Final = {
    ("moonlight", 8): 1.78,
    ("moonlight", 16): 1.83,
    ("qwen", 8): 1.82,
    ("qwen", 16): 2.04,
    ("k2", 8): 1.48,
    ("k2", 16): 1.44,
}
#: Least reduction of the tail's time that Seer publishes over its three models.
TAIL_REDUCTION: Final = 0.72


class Variant(NamedTuple):
    """A policy, and what is left out of it. See `seer_work.policy_of`."""

    policy: str
    order: str = "context"  # of Seer's
    speculates: bool = False


VERL: Final = Variant("verl")
VERL_DRAFTS: Final = Variant("verl", speculates=True)
DIVIDED: Final = Variant("seer", "queue")
CONTEXT: Final = Variant("seer", "context")
LENGTHS_TOLD: Final = Variant("seer", "true_lengths")
SEER: Final = Variant("seer", "context", speculates=True)


class PublishedRatio(Struct, frozen=True, kw_only=True):
    """Throughput of a variant over veRL's, or (`tail`) its tail's time over veRL's."""

    model: str
    variant: Variant
    value: float
    tail: bool = False
    fitted: bool = False  # the cost of verification was chosen by these


#: Of the published group sizes: 8, and 16 of Qwen2-VL-72B. Tables of ablations, of knowledge, of speculation alone.
PUBLISHED: Final = (
    PublishedRatio(model="moonlight", variant=VERL_DRAFTS, value=1.26, fitted=True),
    PublishedRatio(model="qwen", variant=VERL_DRAFTS, value=1.38, fitted=True),
    PublishedRatio(model="k2", variant=VERL_DRAFTS, value=1.25, fitted=True),
    PublishedRatio(model="moonlight", variant=DIVIDED, value=1.41),
    PublishedRatio(model="qwen", variant=DIVIDED, value=1.42),
    PublishedRatio(model="k2", variant=DIVIDED, value=1.16),
    PublishedRatio(model="moonlight", variant=CONTEXT, value=1.47),
    PublishedRatio(model="qwen", variant=CONTEXT, value=1.56),
    PublishedRatio(model="k2", variant=CONTEXT, value=1.27),
    PublishedRatio(model="qwen", variant=LENGTHS_TOLD, value=1.63),
    PublishedRatio(model="moonlight", variant=SEER, value=1.90),
    PublishedRatio(model="qwen", variant=SEER, value=2.04),
    PublishedRatio(model="k2", variant=SEER, value=1.53),
    PublishedRatio(model="qwen", variant=DIVIDED, value=0.79, tail=True),
    PublishedRatio(model="qwen", variant=CONTEXT, value=0.11, tail=True),
    PublishedRatio(model="moonlight", variant=SEER, value=0.16, tail=True),
    PublishedRatio(model="qwen", variant=SEER, value=0.06, tail=True),
    PublishedRatio(model="k2", variant=SEER, value=0.28, tail=True),
)
