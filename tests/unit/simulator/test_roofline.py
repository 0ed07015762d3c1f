"""Derived profiles predict published steps of vLLM.

The points are median times between tokens on H100 in the ML.ENERGY Leaderboard (tasks gpqa and lm-arena-chat): model,
GPUs, sequences that ran on average, milliseconds, and the mean tokens of a response.
"""

from statistics import median
from typing import Final, NamedTuple

import pytest

from ebbtide.simulator.engines import roofline as known
from ebbtide.simulator.engines.roofline import ModelShape, roofline_engine, roofline_trainer


class Point(NamedTuple):
    model: ModelShape
    gpus: int
    batch: float
    ms: float
    response: float


#: The efficiencies are fitted to these,
FITTED: Final = [
    *(Point(known.QWEN3_8B, 1, *rest) for rest in (
        (7.999, 9.704, 7854), (15.999, 11.912, 7861), (31.995, 16.871, 8170), (63.28, 26.642, 8367),
        (81.99, 27.876, 8052),
    )),
    *(Point(known.QWEN3_14B, 1, *rest) for rest in (
        (7.998, 14.423, 6930), (15.997, 17.341, 7432), (31.999, 21.549, 6939), (59.01, 28.066, 6711),
        (7.987, 12.536, 619.5), (15.97, 13.344, 621.6), (31.92, 15.014, 611.4), (63.84, 18.936, 617.2),
        (95.88, 23.496, 622.8), (127.7, 26.164, 613.5), (191.7, 33.369, 612.6), (253.4, 38.403, 624.6),
    )),
]  # fmt: skip
#: the exchange between GPUs to the mean of these four,
EXCHANGES: Final = [
    Point(known.QWEN3_32B, 2, *rest)
    for rest in ((7.999, 16.725, 6936), (15.997, 19.324, 6906), (31.994, 25.268, 7176), (63.83, 32.281, 7058))
]
#: and nothing to these.
JUDGED: Final = [
    *(Point(known.QWEN3_30B_A3B, 1, *rest) for rest in ((7.997, 12.309, 8162), (15.995, 16.749, 8243))),
    *(Point(known.QWEN3_30B_A3B, 2, *rest) for rest in (
        (7.999, 9.367, 8309), (15.999, 11.967, 7950), (31.996, 16.395, 8110), (63.998, 21.539, 8117),
        (95.99, 27.715, 8283), (127.99, 28.595, 8058),
    )),
]  # fmt: skip


def error(point: Point) -> float:
    """Relative error of the predicted step. A context is the prompt and, as long responses are there for longer, some
    more than half of the mean response."""
    prompt = 250 if point.response > 5000 else 150
    context = point.batch * (prompt + 0.55 * point.response)
    costs = roofline_engine(point.model, known.H100, point.gpus).costs
    return 1e3 * costs.step_s(batch=round(point.batch), context=context) / point.ms - 1.0


@pytest.mark.parametrize(
    ("points", "usual", "worst"), [(FITTED, 0.03, 0.10), (EXCHANGES, 0.06, 0.10), (JUDGED, 0.10, 0.20)]
)
def test_published_steps_are_predicted(points: list[Point], usual: float, worst: float) -> None:
    errors = [abs(error(point)) for point in points]
    assert median(errors) < usual
    assert max(errors) < worst


def test_memory_for_the_kv_cache_is_what_the_weights_leave() -> None:
    # Seer's setting: 0.9 of eight GPUs with 80 GB less 147 GB of weights, at 327,680 bytes a token.
    assert roofline_engine(known.QWEN2_VL_72B, known.H800, 8).kv.tokens == pytest.approx(1.31e6, rel=0.01)
    assert roofline_engine(known.MOONLIGHT, known.H800, 1).kv.tokens == pytest.approx(1.29e6, rel=0.01)


def test_more_devices_are_faster_but_not_by_their_number() -> None:
    one, two = (roofline_engine(known.QWEN3_14B, known.H100, gpus) for gpus in (1, 2))
    ratio = one.costs.step_s(batch=64, context=64 * 4000) / two.costs.step_s(batch=64, context=64 * 4000)
    assert 1.2 < ratio < 2.0
    assert two.kv.tokens > 2 * one.kv.tokens
    trainers = [roofline_trainer(known.QWEN3_14B, known.H100, gpus).step_s([4000] * 512) for gpus in (8, 16)]
    assert trainers[0] / trainers[1] == pytest.approx(2.0, rel=0.01)
