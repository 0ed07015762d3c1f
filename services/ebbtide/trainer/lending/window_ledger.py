"""Counts for how long the trainer's device was lent in a step, how often it was taken back, and how long that took."""


class WindowLedger:
    """`now` is in seconds of any one clock. Invariant: the sums are those of the present step."""

    def __init__(self) -> None:
        self._lent_at: float | None = None
        self._lent_s = self._back_s = 0.0
        self._cuts = self._missing = 0

    def opened(self, now: float) -> None:
        """A step begins."""
        self._lent_s = self._back_s = 0.0
        self._cuts = self._missing = 0
        self._lent_at = None if self._lent_at is None else now

    def lent(self, now: float) -> None:
        self._lent_at = now if self._lent_at is None else self._lent_at

    def asked(self, now: float, *, missing: int) -> None:
        """The device is wanted back, while so many groups of the step are missing."""
        if self._lent_at is not None:
            self._lent_s += now - self._lent_at
            self._lent_at = None
            self._cuts += missing > 0
            self._missing = missing

    def back(self, seconds: float) -> None:
        """It is back, so long after it was wanted."""
        self._back_s += seconds

    def values(self) -> dict[str, float]:
        """Seconds lent and seconds of waiting for its return; how often groups were cut, and of how many at last."""
        return {
            "lent_s": self._lent_s,
            "take_back_s": self._back_s,
            "window_cuts": float(self._cuts),
            "window_missing_groups": float(self._missing),
        }
