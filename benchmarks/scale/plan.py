"""How large the benchmark is."""

from msgspec import Struct


class ScalePlan(Struct, frozen=True, kw_only=True):
    """`rate`: tokens/s of the whole fleet. `fill_s`: seconds within which all slots should be taken, at `starts_per_s`;
    the other rollouts are queued at `submits_per_s`. `steady_s`, `idle_s`, `watched_s`: seconds that are measured under
    load, with nothing to do, and after a takeover. `silenced`: workers of each process that fall silent. `kills`: of
    the leading coordinator. `finished`: rollouts of the memory's part. `http_cases`: generated HTTP messages.
    `token_*`: of the part at a high rate of tokens.
    """

    workers: int = 1000
    slots: int = 64
    queued: int = 100_000
    runs: int = 20
    users: int = 4
    fleets: int = 2
    rate: float = 6_000.0
    lengths: tuple[int, int] = (1, 200)
    arrive_s: float = 5.0
    idle_s: float = 20.0
    fill_s: float = 240.0
    starts_per_s: float = 500.0
    submits_per_s: float = 2_000.0
    steady_s: float = 60.0
    watched_s: float = 20.0
    silenced: int = 5
    kills: int = 1
    finished: int = 2_000_000
    http_cases: int = 100_000
    token_workers: int = 100
    token_rate: float = 200_000.0
    token_windows: int = 10
    token_window_s: float = 5.0
    virtual_s: float = 20.0

    @property
    def live(self) -> int:
        """Rollouts that run once all slots are taken."""
        return self.workers * self.slots


QUICK = ScalePlan(
    idle_s=5.0,
    fill_s=120.0,
    starts_per_s=800.0,
    submits_per_s=5_000.0,
    steady_s=12.0,
    watched_s=10.0,
    finished=100_000,
    http_cases=8_000,
    token_window_s=2.0,
    virtual_s=2.0,
)
