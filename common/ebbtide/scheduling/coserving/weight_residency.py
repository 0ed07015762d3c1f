"""Decides where the weights of a borrowing engine should stay: on the device, in host memory, or nowhere.

The result is a wish. Workers on GPUs fulfil it by vLLM's sleep mode, from AWAKE; on CPU builds by giving up memory.

Invariant: weights go down a level only while memory is short after all keys and values were given back. They come up
only if there is room and the expected idle time pays for the wake-up. Both lower levels free the same memory on a
device. Only the second one frees host memory too, and then a wake-up has to load the weights. An engine on a CPU has
only host memory, so only the second level helps.
"""

from typing import Final

from msgspec import Struct

from ebbtide.types.grants import Residency

#: Assumed wake-up times until they are measured. They are long, because a wake-up that does not pay delays rollouts
#: that could run elsewhere.
_HOST_S: Final = 5.0
_AWAY_S: Final = 60.0
#: The headroom covers a shortage that is shorter than this.
_PATIENCE_S: Final = 0.5
#: An idle time pays for a wake-up if it is this many times as long: then two thirds of it are used.
_PAYS: Final = 3.0


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """The memory around one borrowing engine, in bytes."""

    short: int  # that serving lacks on the device, even without rollouts' keys and values
    spare: int  # free on the device beside what serving needs
    weights: int  # that the engine needs to be awake
    host_short: int = 0
    host_spare: int = 0
    device: bool = False  # whether the engine computes on a device with its own memory


class ResidencyPlan:
    """Decides for one borrower."""

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
        """Where the weights should be. `at`: where they are; `idle_s`: how long borrowing will probably be possible;
        `wake_host_s` and `wake_away_s`: measured wake-up times, 0: unknown."""
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
        """One level down, or two if the first one would not help."""
        if not memory.device:
            wanted = Residency.AWAY
        elif at is Residency.AWAKE:
            wanted = Residency.HOST if memory.host_spare >= memory.weights else Residency.AWAY
        else:
            wanted = Residency.AWAY if memory.host_short > 0 else at
        if wanted > at:
            self._down_at = now
        return max(at, wanted)
