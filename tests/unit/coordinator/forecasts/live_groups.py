"""Groups of rollouts as a coordinator's queue and workers have them, for tests of live forecasts."""

from collections.abc import Sequence

from ebbtide.coordinator.forecasts.run_forecasts import KnownGroup, RunForecasts
from tests.unit.coordinator.forecasts.drawn_lengths import CAP


class Sample:
    """An open rollout, of which more and more tokens are stored."""

    def __init__(self, made: int = 0) -> None:
        self.made = made


def name_of(place: int, number: int) -> str:
    return f"s{place}.{number}"


def submit(forecasts: RunForecasts, place: int, size: int, prompt: str = "", *, cap: int = CAP) -> KnownGroup:
    for number in range(size):
        group = forecasts.wait(name_of(place, number), place, Sample(), cap=cap, prompt=prompt)
    return group


def begin(forecasts: RunForecasts, place: int, numbers: Sequence[int], *, cap: int = CAP) -> list[Sample]:
    samples = [Sample() for _ in numbers]
    for number, sample in zip(numbers, samples, strict=True):
        forecasts.run(name_of(place, number), place, sample, cap=cap)
    return samples


def play(forecasts: RunForecasts, first: int, groups: Sequence[Sequence[int]], now: float) -> None:
    """A whole step: its groups are submitted, run and end."""
    for at, lengths in enumerate(groups):
        submit(forecasts, first + at, len(lengths))
    for at, lengths in enumerate(groups):
        begin(forecasts, first + at, range(len(lengths)))
    for at, lengths in enumerate(groups):
        for number, tokens in enumerate(lengths):
            forecasts.finish(name_of(first + at, number), first + at, tokens, whole=tokens < CAP)
    forecasts.renew(now)
