"""How soon a silent worker must be noticed, and a silent leader replaced, how little may be lost with a worker, and how
long one may be held or a run wait for its turn, in a world that is otherwise well.

All is promised only while coordinator and store are well, so it is watched for how long they have been.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from ebbtide.coordinator.election import LOOK_S, STEADY_S
from ebbtide.coordinator.rules.liveness import JUDGE_EVERY_S, TIMEOUT_S
from tests.simulation.loop import Proc, SimLoop
from tests.simulation.monitor import Monitor
from tests.simulation.network import Network, Wire
from tests.simulation.plan import Plan
from tests.simulation.run_view import RunView
from tests.simulation.turns import Turns

_LOOK_S: Final = 0.25
#: From the judge's verdict to the store's: a round trip or two, a moment for what was sent, and our own look.
_MARGIN_S: Final = 0.5 + _LOOK_S
#: So long after coordinator or store came back silence counts again: boot, the grace for workers, and a timeout.
_RECOVERED_S: Final = 12.0
#: What was sent before a disturbance has come or is given up so long after it.
_SETTLED_S: Final = 5.0
#: And connections that it broke without a word are made again.
_FLOWS_S: Final = 16.0
#: Generation is held while the store has a backlog, or new weights are installed: all is well again much sooner.
_HELD_S: Final = 15.0
#: A lease that is free is taken within so long: a standby looks, and has to be sure that the store was there all along.
_REPLACED_S: Final = STEADY_S + LOOK_S + 1.0 + _LOOK_S
#: So long after a coordinator and the store could reach each other again it has a connection.
_REJOINED_S: Final = 6.0
#: While the clock of a store that syncs every second is set back, it syncs nothing: only the kernel writes to the disk,
#: within so long, and a coordinator that took over waits for that before it serves.
_UNSYNCED_S: Final = 31.0
#: For so long the coordinator lets messages gather for one call to the store.
_GATHERED_S: Final = 0.005


def _has_twin(proc: Proc) -> bool:
    """Whether another process of its name lives: they take the worker's session from each other, again and again."""
    former = proc.former
    while former and not former.alive:  # the one between was killed: the first may live on
        former = former.former
    return former is not None


class Promises:
    """`proc`: the latest process of each name, as the world has them; `leader`: the coordinator that leads."""

    def __init__(
        self,
        loop: SimLoop,
        network: Network,
        monitor: Monitor,
        plan: Plan,
        proc: dict[str, Proc],
        leader: Callable[[], str],
    ) -> None:
        self._loop, self._network, self._monitor, self._proc = loop, network, monitor, proc
        self._leader = leader
        self._noticed_s = TIMEOUT_S + JUDGE_EVERY_S + _MARGIN_S + plan.reattach_grace_s
        self._window = min(plan.flush_tokens, int(plan.flush_interval_ms / 1000 / plan.script.step_s) + 1)
        # A message's way must be short beside the interval, or several are on their way at once, whatever is promised.
        self._prompt = 4 * (2 * network.most_s + _GATHERED_S) <= plan.flush_interval_ms / 1000
        self._core: tuple[Proc, ...] = ()
        self._forgetful = plan.forgetful
        self._latest = 0.0  # the latest time that the store's clock showed
        self._served = 0.0  # when a coordinator that took over meanwhile serves
        self._unwell = 0.0  # when coordinator or store were last not well
        self._silent: dict[Proc, float] = {}  # since when
        self._held: dict[Proc, float] = {}  # since when, as it says
        self._left: dict[Proc, tuple[float, bool]] = {}  # when a worker was killed or told to leave, and whether killed
        monitor.on_loss, monitor.on_token = self._lost, self._token
        # When each of two coordinators was last not well, or apart from the store.
        self._apart = dict.fromkeys(("coordinator", "standby") if plan.standby else (), 0.0)
        self._leaderless = 0.0  # since when nobody holds the lease, though somebody could take it
        self._weak = 0.0  # when a worker or the relay was last not well
        self.turns = Turns(loop, monitor, self._serves_well)

    async def watch(self) -> None:
        """For ever: hold silent workers' attempts against the time by which they must have been ended."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._look_at_core()
            self._look_at_workers()
            self._look_at_leader()
            parts = (proc for name, proc in self._proc.items() if name == "relay" or name[0] == "w")
            if not all(self._well(proc) and not _has_twin(proc) for proc in parts):
                self._weak = self._loop.now
            self.turns.look()

    def leaves(self, proc: Proc, *, killed: bool) -> None:
        """A worker is killed, or gets a notice: is it, and all that it needs, well?"""
        self._look_at_core()
        if proc.name[0] == "w" and proc not in self._left and self._at_peace(proc):
            self._left[proc] = (self._loop.now, killed)
        elif killed:
            self._left.pop(proc, None)  # killed while it left: nothing was promised of both

    # -- silence -------------------------------------------------------------------------------------------------

    def _look_at_core(self) -> None:
        now, redis = self._loop.now, self._proc["redis"]
        core = (self._proc[self._leader()], redis)
        self._latest = max(self._latest, now + redis.clock)
        if core != self._core and self._forgetful and now + redis.clock < self._latest:
            self._served = now + _UNSYNCED_S
        if core != self._core or not all(map(self._well, core)) or not self._joined(*core) or now < self._served:
            self._core, self._unwell = core, now

    def _well(self, proc: Proc) -> bool:
        return proc.alive and not proc.stopped and proc.cost is None

    def _joined(self, one: Proc, other: Proc) -> bool:
        """Whether `one` reaches `other`: not while it holds on to a connection that nothing comes through, be it to a
        process that died: where no reset comes either, that takes as long to find out as with a living one.
        """
        cut = self._network.is_cut(one, other) or self._network.is_cut(other, one)
        held = [
            wire
            for wire in self._network.wires
            if wire.procs[0] is one and wire.procs[1].name == other.name and wire.open[0]
        ]
        return not cut and not any(wire.stalled or any(wire.vanishing) for wire in held)

    def _wires(self, client: Proc, server: Proc) -> list[Wire]:
        return [wire for wire in self._network.wires if wire.procs == (client, server) and any(wire.open)]

    def _is_silent(self, proc: Proc) -> bool:
        """Whether nothing of the worker can come to the coordinator."""
        coordinator = self._core[0]
        if not proc.alive or proc.stopped or self._network.is_cut(proc, coordinator):
            return True
        wires = self._wires(proc, coordinator)
        return bool(wires) and all(wire.vanishing[0] for wire in wires)

    def _look_at_workers(self) -> None:
        now, owner, busy = self._loop.now, self._monitor.owner, dict[Proc, str]()
        for one in self._monitor.rollouts.values():
            if one.state == "running" and one.attempt in owner:
                busy[owner[one.attempt]] = one.attempt
        self._silent = {proc: self._silent.get(proc, now) for proc in busy if self._is_silent(proc)}
        if now - self._unwell < _RECOVERED_S:
            return
        for proc, since in self._silent.items():
            if now - since > self._noticed_s:
                attempt = busy[proc]
                self._monitor.fail(
                    f"{proc} says nothing since {since:.2f} s, and {self._monitor.of[attempt]} is still its"
                )

    def beats(self, proc: Proc, *, held: bool) -> None:
        """A worker says whether its generation is held."""
        if not held:
            self._held.pop(proc, None)
            return
        since, relay = self._held.setdefault(proc, self._loop.now), self._proc["relay"]
        long = self._loop.now - since > _HELD_S
        if long and self._at_peace(proc, _HELD_S) and self._well(relay) and not relay.struck:
            self._monitor.fail(f"{proc} is held since {since:.2f} s, though all is well")

    # -- the leader, and the runs' turns -------------------------------------------------------------------------

    def _look_at_leader(self) -> None:
        """Somebody takes the lease once it is free and a coordinator is well that could."""
        now, redis, leadership = self._loop.now, self._proc["redis"], self._monitor.leadership
        assert self._monitor.store is not None
        free = leadership.is_free(self._monitor.store.data, time.time() + redis.clock)
        for name in self._apart:
            proc = self._proc[name]
            there = self._well(proc) and self._well(redis) and self._joined(proc, redis)
            if not there or leadership.is_superseded(proc):
                self._apart[name] = now
        able = any(now - since > _REJOINED_S for since in self._apart.values())
        if not (free and able):
            self._leaderless = now
        elif now - self._leaderless > _REPLACED_S:
            self._monitor.fail(f"nobody leads since {self._leaderless:.2f} s; {leadership.holder} was the last")

    def _token(self, proc: Proc, run: RunView) -> None:
        self.turns.token(proc, run)
        if self._loop.now > run.over_at:
            self.turns.lets_go(proc, run, self._at_peace)

    def _serves_well(self, since_s: float) -> bool:
        """Whether the leader, the store, the relay and every worker are well for so long, with nothing in their way."""
        well_since = max(self._unwell, self._weak) + _RECOVERED_S
        return self._loop.now - max(well_since, self._network.disturbed + _FLOWS_S) > since_s

    # -- losses --------------------------------------------------------------------------------------------------

    def _at_peace(self, proc: Proc, since_s: float = 0.0) -> bool:
        now = self._loop.now
        quiet = now - max(self._unwell, self._network.disturbed) > since_s + _SETTLED_S
        return quiet and not proc.struck and self._well(proc)

    def _lost(self, name: str, attempt_id: str, lost: int) -> None:
        """An attempt ended before its rollout, and so many tokens of it are generated again."""
        proc = self._monitor.owner.get(attempt_id)
        if proc is None or proc not in self._left:
            return
        when, killed = self._left[proc]
        self._look_at_core()
        if max(self._unwell, self._network.disturbed) >= when or not (self._prompt if killed else not proc.struck):
            return
        # On its way when the worker was killed may have been one message, and behind it one more token was made.
        most = self._window + 1 if killed else 0
        if lost > most:
            how = "was killed" if killed else "was told to leave"
            self._monitor.fail(f"{lost} tokens of {name} were lost with {proc}, which {how}; at most {most} may be")
