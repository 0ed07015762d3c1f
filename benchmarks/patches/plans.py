"""Which real policies are made, and where their versions lie. No torch here: what is there is found at once."""

from dataclasses import dataclass
from typing import Final

#: Beside the versions: how they came about. Written last, its presence says that they are whole.
RECORD: Final = "record.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Shape and training of a network; `pairs` consecutive ones are kept at each rate, after `settle` steps at it.

    At the rate `masters` the first pair is kept in float32 too.
    """

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward_size: int
    batch: int
    steps: int
    rates: tuple[float, ...]
    pairs: int
    learning_rate: float = 6e-4
    warmup: int = 20
    settle: int = 2
    masters: float = 0.0


PLANS: Final = {
    "real": Plan(
        layers=13, hidden_size=768, heads=12, kv_heads=4, head_dim=64, feed_forward_size=2688,
        batch=8, steps=120, rates=(3e-7, 1e-6, 3e-6, 1e-5), pairs=3,
    ),
    "small": Plan(
        layers=6, hidden_size=384, heads=6, kv_heads=2, head_dim=64, feed_forward_size=1280,
        batch=8, steps=60, rates=(3e-7, 1e-6, 3e-6, 1e-5, 3e-4), pairs=1, masters=1e-6, learning_rate=1e-3,
    ),
}  # fmt: skip


def version_file(number: int, *, masters: bool = False) -> str:
    return f"{number:03}{'-float32' if masters else ''}.safetensors"
