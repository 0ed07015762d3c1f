"""The network between simulated processes: wires that deliver in order, late, not at all, or break.

A wire is one connection. What is sent arrives after a drawn delay, never before what was sent earlier. Between hosts
that are cut off from each other frames wait, as TCP repeats them, and come when the cut is mended; on a wire that is
half open they vanish. Wires with keepalive notice silence within 10 to 15 s, as `rpc.options` has it; others never.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

from tests.simulation.loop import Proc, SimLoop

_KEEPALIVE_S: Final = (10.0, 15.0)
#: By how much later than on a new connection what was held back by a cut comes through on an old one.
_REPEATED_S: Final = (0.3, 0.7, 1.5, 6.0)


class End(Protocol):
    """What a process has at its end of a wire."""

    def arrived(self, frame: tuple[Any, ...]) -> None: ...

    def broken(self, reason: str) -> None: ...


class Wire:
    """A connection between `procs[0]`, who opened it, and `procs[1]`. Ends are set before anything is sent."""

    def __init__(self, network: "Network", client: Proc, server: Proc, *, keepalive: bool) -> None:
        self.network, self.procs, self.keepalive = network, (client, server), keepalive
        self.ends: list[End | None] = [None, None]
        self.open = [True, True]  # as each end sees it
        self.vanishing = [False, False]  # what this end sends is lost
        self.stalled = False  # what the client sends comes late
        self._last = [0.0, 0.0]  # when the last frame of this end arrives
        self._held: list[list[tuple[Any, ...]]] = [[], []]
        self._silent: list[Any] = [None, None]

    def send(self, end: int, frame: tuple[Any, ...]) -> None:
        """From `end` to the other one."""
        source, target = self.procs[end], self.procs[1 - end]
        if not self.open[end] or not source.alive or self.vanishing[end]:
            return
        if self.network.is_cut(source, target) or (self.stalled and end == 0):
            self._held[end].append(frame)
            return
        self._carry(end, frame)

    def _carry(self, end: int, frame: tuple[Any, ...]) -> None:
        network, target = self.network, self.procs[1 - end]
        when = max(self._last[end], network.loop.now + network.delay(self.procs[end], target))
        self._last[end] = when
        target.after(when - network.loop.now, self._arrive, 1 - end, frame)

    def _arrive(self, end: int, frame: tuple[Any, ...]) -> None:
        if not self.open[end]:
            return
        if frame[0] == "close":
            self.break_at(end, frame[1])
            return
        handler = self.ends[end]
        assert handler is not None
        handler.arrived(frame)

    def close(self, end: int, reason: str = "the peer closed the connection") -> None:
        """This end is done; the other learns of it in the order of what was sent before."""
        if self.open[end]:
            self.send(end, ("close", reason))
            self.open[end] = False
            self._forget()

    def break_at(self, end: int, reason: str) -> None:
        """This end finds the connection dead. The other one is told if that is possible."""
        if self.open[end]:
            self.close(end, "connection reset by peer")
            handler = self.ends[end]
            if handler is not None:
                handler.broken(reason)

    def _forget(self) -> None:
        if not any(self.open):
            self.network.wires.pop(self, None)

    def died(self, end: int) -> None:
        """The process at `end` was killed: its kernel resets the connection."""
        if self.open[end]:
            self.open[end] = False
            source, target = self.procs[end], self.procs[1 - end]
            reset = ("close", "connection reset by peer")
            if self.network.is_cut(source, target) or (self.stalled and end == 0):
                self._held[end].append(reset)
            elif not self.vanishing[end]:
                self._carry(end, reset)
            self._forget()

    # -- silence -------------------------------------------------------------------------------------------------

    @property
    def silent(self) -> bool:
        """Whether anything keeps an answer from coming through."""
        client, server = self.procs
        network = self.network
        return (
            any(self.vanishing)
            or self.stalled
            or network.is_cut(client, server)
            or network.is_cut(server, client)
            or any(proc.stopped for proc in self.procs)
        )

    def flow(self) -> None:
        """What was stalled comes through, though this connection may have been given up long ago."""
        self.stalled = False
        self.network.disturbed = self.network.loop.now
        self.judge()

    def judge(self) -> None:
        """Something changed: begin or end to count silence, and deliver what waited for a cut to be mended."""
        for end in (0, 1):
            cut = self.network.is_cut(self.procs[end], self.procs[1 - end]) or (self.stalled and end == 0)
            if self._held[end] and not cut:
                held, self._held[end] = self._held[end], []
                if not self.network.loop.random.randrange(3):  # the pauses between repeats have grown meanwhile
                    self._last[end] = self.network.loop.now + self.network.loop.random.choice(_REPEATED_S)
                for frame in held:
                    self._carry(end, frame)
        silent = self.silent and self.keepalive
        for end in (0, 1):
            if silent and self._silent[end] is None:
                wait = self.network.loop.random.uniform(*_KEEPALIVE_S)
                self._silent[end] = self.procs[end].after(wait, self._give_up, end)
            elif not silent and self._silent[end] is not None:
                self._silent[end].cancel()
                self._silent[end] = None

    def _give_up(self, end: int) -> None:
        self._silent[end] = None
        if self.silent and not self.procs[end].stopped:
            self.break_at(end, "keepalive watchdog timeout")


class Network:
    """`listeners`: port -> what accepts wires there."""

    def __init__(self, loop: SimLoop, note: Callable[[Wire, int, str, int, tuple[Any, ...]], None]) -> None:
        self.loop, self.note = loop, note
        self.wires: dict[Wire, None] = {}
        self.listeners: dict[int, tuple[Proc, Callable[[Wire], None]]] = {}
        self.cuts: dict[tuple[str, str], int] = {}
        self.disturbed = 0.0  # when something was last done to it
        base = loop.random.choice((0.0001, 0.0005, 0.002))
        self._least, self.most_s = base, base * loop.random.choice((1.5, 4.0, 12.0))

    def delay(self, source: Proc, target: Proc) -> float:
        delay = self.loop.random.uniform(self._least, self.most_s)
        return delay * 10 if source.cost or target.cost else delay

    def is_cut(self, source: Proc, target: Proc) -> bool:
        return (source.name, target.name) in self.cuts

    def listen(self, port: int, proc: Proc, accept: Callable[[Wire], None]) -> None:
        self.listeners[port] = (proc, accept)

    def connect(self, client: Proc, port: int, *, keepalive: bool) -> Wire | None:
        """A wire to whoever listens; None if nobody does. The caller accounts for the time that it takes."""
        found = self.listeners.get(port)
        if found is None or not found[0].alive:
            return None
        server, accept = found
        wire = Wire(self, client, server, keepalive=keepalive)
        self.wires[wire] = None
        accept(wire)
        if keepalive:
            wire.judge()
        return wire

    def reachable(self, client: Proc, port: int) -> bool:
        """Whether packets get to the host of `port` and back, and a process answers there or refuses."""
        found = self.listeners.get(port)
        if found is None:
            return True
        return not (self.is_cut(client, found[0]) or self.is_cut(found[0], client))

    def killed(self, proc: Proc) -> None:
        for wire in list(self.wires):
            for end in (0, 1):
                if wire.procs[end] is proc:
                    wire.died(end)

    def judge(self) -> None:
        """A process was stopped or goes on, or a cut came or went."""
        for wire in list(self.wires):
            wire.judge()

    def cut(self, source: str, target: str) -> None:
        self.cuts[source, target] = self.cuts.get((source, target), 0) + 1
        self.disturbed = self.loop.now
        self.judge()

    def mend(self, source: str, target: str) -> None:
        self.cuts[source, target] -= 1
        self.disturbed = self.loop.now
        if not self.cuts[source, target]:
            del self.cuts[source, target]
        self.judge()

    def half_open(self, proc: Proc, *, ways: tuple[int, ...]) -> int:
        """The connections that `proc` has now lose what is sent, by it (0), to it (1), or both. Returns how many."""
        hit, self.disturbed = 0, self.loop.now
        for wire in list(self.wires):
            if proc in wire.procs:
                mine = wire.procs.index(proc)
                for way in ways:
                    wire.vanishing[mine if way == 0 else 1 - mine] = True
                hit += 1
                wire.judge()
        return hit
