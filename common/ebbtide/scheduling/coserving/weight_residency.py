"""Where the weights of a borrowing engine should stay: on the device, in host memory, or nowhere. A wish: workers
fulfil it on CPU builds, and those on GPUs do not, as they do not drive vLLM's sleep mode.

Invariant: they go down a level only while memory is short after all keys and values were given back, and come up only
where there is room for them and the idle time to come pays for the wake-up. Both levels free the same on a device;
only the second one frees the host's memory too, and costs a load. Without a device of its own, on a CPU, host memory is
all there is, so that only the second one helps.
"""

from typing import Final

from msgspec import Struct

from ebbtide.types.grants import Residency

#: Taken for wake-up times that were not measured yet, seconds. On the long side: a wake-up that does not pay is paid by
#: nobody's traffic, but by the rollouts that could have gone elsewhere.
_HOST_S: Final = 5.0
_AWAY_S: Final = 60.0
#: Memory that is short for less than this is left to the headroom.
_PATIENCE_S: Final = 0.5
#: An idle time pays for a wake-up if it is this many times as long: two thirds of it are harvested, then.
_PAYS: Final = 3.0


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """Bytes. `short`: that serving lacks on the device beyond all keys and values of rollouts; `spare`: free there
    beside what serving needs; `host_short`, `host_spare`: the same of the host. `weights`: what the engine needs to be
    awake. `device`: whether it computes on a device with memory of its own."""

    short: int
    spare: int
    weights: int
    host_short: int = 0
    host_spare: int = 0
    device: bool = False


class ResidencyPlan:
    """See the module. One for each borrower."""

    def __init__(self) -> None:
        self._short_since: float | None = None
        self._down_at = float("-inf")

    def decide(
        self,
        now: float,
        *,
        at: Residency,
        memory: DeviceMemory,
        idle_s: float,
        wake_host_s: float = 0.0,
        wake_away_s: float = 0.0,
    ) -> Residency:
        """Where they should be. `at`: where they are; `idle_s`: for how long borrowing will probably be possible; the
        measured times of wake-ups, 0: not known."""
        if memory.short > 0 or (at is Residency.HOST and memory.host_short > 0):
            if self._short_since is None:
                self._short_since = now
            if now - self._short_since >= _PATIENCE_S:
                return self._down(now, at, memory)
            return at
        self._short_since = None
        if at is Residency.AWAKE:
            return at
        wake_s = (wake_host_s or _HOST_S) if at is Residency.HOST else (wake_away_s or _AWAY_S)
        room = memory.spare >= memory.weights
        rested = now - self._down_at >= wake_s
        return Residency.AWAKE if room and rested and idle_s >= _PAYS * wake_s else at

    def _down(self, now: float, at: Residency, memory: DeviceMemory) -> Residency:
        """One level, or two where the first one would not help."""
        if not memory.device:
            wanted = Residency.AWAY
        elif at is Residency.AWAKE:
            wanted = Residency.HOST if memory.host_spare >= memory.weights else Residency.AWAY
        else:
            wanted = Residency.AWAY if memory.host_short > 0 else at
        if wanted > at:
            self._down_at = now
        return max(at, wanted)
