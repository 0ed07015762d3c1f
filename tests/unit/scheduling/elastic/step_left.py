"""Steps under way, made up for window decisions."""

from math import exp, sqrt
from random import Random

from ebbtide.scheduling.elastic.engine_pace import EnginePace
from ebbtide.scheduling.elastic.group_lengths import GroupLeft
from ebbtide.scheduling.elastic.loan_view import LendableDevice, LoanView

CAP = 14_336


def drawn_groups(draw: Random, groups: int = 128, *, size: int = 8, correlation: float = 0.9) -> list[list[int]]:
    """Lengths of groups whose samples are alike."""
    found = []
    for _ in range(groups):
        shared = draw.gauss()
        parts = [sqrt(correlation) * shared + sqrt(1 - correlation) * draw.gauss() for _ in range(size)]
        found.append([min(CAP, max(1, round(4_000 * exp(0.6 * part)))) for part in parts])
    return found


def left_of(groups: list[list[int]], made: int) -> list[GroupLeft]:
    """What is left once each running sample has made so many tokens."""
    return [
        GroupLeft(
            prompt=256,
            finished=[one for one in lengths if one <= made],
            running=[made for one in lengths if one > made],
            cap=CAP,
        )
        for lengths in groups
        if max(lengths) > made
    ]


#: An engine's step takes 12 ms and 0.2 ms for each rollout, whatever its context.
PLAIN = EnginePace(step_s=0.012, rollout_s=0.0002)


def view(
    groups: list[GroupLeft],
    *,
    remote: float,
    devices: int = 4,
    ready: int = 0,
    complete: int = 0,
    off_s: float = 0.0,
    on_s: float = 0.0,
    busy: bool = True,
) -> LoanView:
    return LoanView(
        groups=groups,
        ready_tokens=ready,
        complete=complete,
        remote=remote,
        devices=[LendableDevice(name=str(at), on_s=on_s, off_s=off_s, busy=busy) for at in range(devices)],
        batch=64.0,
        kv_tokens=400_000.0,
        pace=PLAIN,
        read_s=1.0 / 20_000.0,
    )
