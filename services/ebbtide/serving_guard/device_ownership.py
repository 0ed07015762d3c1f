"""Decides who may compute on a trainer's device: the trainer that owns it, or the engines that it lends it to.

The device is never without a user. While its owner lives, the owner's newest wish counts. It is lent when the owner is
gone: after a while without a sign of life, or soon after the owner's stream broke. A guard that has just begun knows
no owner, and one may be in the middle of a step. So the device is settling then, and lent to nobody, for as long as an
owner takes to come back.

A run's newer lease replaces the older one, which is refused from then on. Another run waits until the owner is gone.

Invariant: at most one owner, of which one connection counts, the newest. Lost with the process: owners state their
lease and wish again. The next life is handed the newest leases, so that it refuses older ones from its beginning on.

`LoanForecast` forecasts for borrowers how long the device stays lent or held, and for which share of the time it is
lent. The owner may say how long its wish will stand. Otherwise the expected rest follows from earlier spells that
lasted longer than this one has; if none did, the rest is expected to be as long as the spell so far.

Invariant: the device is either lent or held; `_since` is when the present spell began. Lost with the process; a few
steps teach it again.
"""

from collections import deque
from collections.abc import Iterable
from statistics import fmean
from typing import Final

from msgspec import Struct

from ebbtide.errors import NotReady, Superseded
from ebbtide.types.grants import Forecast

#: Runs whose newest lease is remembered: a host trains them one after another.
_RUNS: Final = 64
#: A lease that was not heard of for so long is forgotten, as trainer leases expire within a minute: a store that was
#: wiped counts from one again.
_REMEMBERED_S: Final = 600.0


class OwnerLease(Struct, frozen=True):
    """By what a trainer owns the device."""

    run_id: str
    lease: int  # number of the run's trainer lease
    owner: str  # drawn by the process that holds it


class DeviceClaim:
    """One connection of an owner. Equal to itself alone."""

    def __init__(self, lease: OwnerLease) -> None:
        self.lease = lease


class DeviceOwnership:
    """`now` is in seconds of any one clock. `settle_s`: an owner takes so long to come back to a new guard;
    `silent_s`: it is gone after such a silence; `rejoin_s`: it may reconnect for so long after its stream broke.
    """

    def __init__(
        self,
        now: float,
        *,
        settle_s: float,
        silent_s: float,
        rejoin_s: float,
        remembered: Iterable[OwnerLease] = (),
    ) -> None:
        """`remembered`: the `newest` leases of the guard's former life."""
        self._silent_s, self._rejoin_s = silent_s, rejoin_s
        self._settled_at = now + settle_s
        self._gone_at = self._settled_at  # the owner is gone from then on
        self._claim: DeviceClaim | None = None
        self._lease: OwnerLease | None = None
        self._lends = False  # the owner's newest wish
        #: Of each run, and when it was last heard of.
        self._newest = {lease.run_id: (lease, now) for lease in remembered}

    def claim(self, now: float, lease: OwnerLease, *, lends: bool) -> DeviceClaim:
        """Own the device by `lease`. Raises `Superseded` for an older lease of a run, and `NotReady` while a trainer of
        another run owns it.
        """
        newest, heard_at = self._newest.get(lease.run_id, (lease, now))
        older = lease.lease < newest.lease and now - heard_at < _REMEMBERED_S
        if older or (self._rivals(newest, lease) and self._lives(now)):
            raise Superseded(f"run {lease.run_id} has a trainer with a newer lease on this device; step down")
        if self._lease is not None and self._lease.run_id != lease.run_id and self._lives(now):
            text = f"the trainer of run {self._lease.run_id} owns this device; end that run, or wait until it has ended"
            raise NotReady(text)
        self._lease, self._claim = lease, DeviceClaim(lease)
        self.wish(now, self._claim, lends=lends)
        return self._claim

    def wish(self, now: float, claim: DeviceClaim, *, lends: bool) -> None:
        """The owner lives, and lends the device or does not. Raises `Superseded` if another connection counts."""
        self.check(claim)
        self._lends, self._gone_at = lends, now + self._silent_s
        self._newest.pop(claim.lease.run_id, None)
        self._newest[claim.lease.run_id] = claim.lease, now
        if len(self._newest) > _RUNS:
            del self._newest[next(iter(self._newest))]

    def check(self, claim: DeviceClaim) -> None:
        """Raises `Superseded` if another connection counts."""
        if claim is not self._claim:
            raise Superseded(f"another trainer of run {claim.lease.run_id} owns this device now; step down")

    def broke(self, now: float, claim: DeviceClaim) -> None:
        """The connection is over: the owner is gone unless it comes back soon."""
        if claim is self._claim:
            self._claim = None
            self._gone_at = min(self._gone_at, now + self._rejoin_s)

    def lends(self, now: float) -> bool:
        """Whether engines that borrow may compute."""
        return self.state(now) in ("lent", "abandoned")

    def state(self, now: float) -> str:
        """settling, held, lent or abandoned."""
        if self._lease is None and now < self._settled_at:
            return "settling"
        if not self._lives(now):
            return "abandoned"
        return "lent" if self._lends else "held"

    def newest(self) -> tuple[OwnerLease, ...]:
        """The newest lease of each run, those heard of last at the end."""
        return tuple(lease for lease, _ in self._newest.values())

    @property
    def owner(self) -> OwnerLease | None:
        """Who owns the device, or last did."""
        return self._lease

    def _lives(self, now: float) -> bool:
        return self._lease is not None and now < self._gone_at

    def _rivals(self, newest: OwnerLease, lease: OwnerLease) -> bool:
        """Whether two processes hold leases of one number: the store forgot a claim, or does not count claims."""
        return newest == self._lease and newest.lease == lease.lease and newest.owner != lease.owner


#: Spells of each kind that count: a run's steps resemble the latest ones.
_MEMORY: Final = 16
_MINUTE_S: Final = 60.0


class LoanForecast:
    """`now` is in seconds of any one clock."""

    def __init__(self) -> None:
        self._spells = {True: deque[float](maxlen=_MEMORY), False: deque[float](maxlen=_MEMORY)}
        self._lent = False
        self._since: float | None = None
        self._ends: float | None = None  # when the present spell ends, as the owner says

    def turn(self, now: float, *, lent: bool, spell_s: float = 0.0) -> None:
        """The device is lent or held from now on. `spell_s`: for how long, as its owner says; 0: it does not say."""
        if self._since is None or lent is not self._lent:
            if self._since is not None:
                self._spells[self._lent].append(max(0.0, now - self._since))
            self._since, self._ends = now, None
        self._lent = lent
        if spell_s > 0.0:
            self._ends = now + spell_s

    def forecast(self, now: float) -> Forecast:
        left = self._left(now)
        soon = min(1.0, left / _MINUTE_S)
        return Forecast(share=soon * self._lent + (1.0 - soon) * self._usual(), spell_s=left)

    def _left(self, now: float) -> float:
        if self._since is None:
            return 0.0
        if self._ends is not None and self._ends > now:
            return self._ends - now
        lasted = max(0.0, now - self._since)
        longer = [spell - lasted for spell in self._spells[self._lent] if spell > lasted]
        return fmean(longer) if longer else lasted

    def _usual(self) -> float:
        """The share of the time in which the device is lent; until both kinds are known, that of the present kind."""
        lent, held = self._spells[True], self._spells[False]
        if not lent or not held:
            return float(self._lent)
        return fmean(lent) / max(1e-9, fmean(lent) + fmean(held))
