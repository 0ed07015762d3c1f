"""Lets the spot machines of a plan come and go: each brings a worker on a core of its own, and loses it.

A machine boots its worker when it comes. It is told of its loss some seconds before, as clouds do: its worker hands its
rollouts over and leaves. What still runs at the loss is killed.

Invariant: a core has one machine at a time. `stays` has each machine that came, in order; one without an end is there.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from ebbtide.demo.elastic.elastic_options import MachinePlan
from ebbtide.local_cluster.launcher import Program
from ebbtide.local_cluster.local_cluster import LocalCluster
from ebbtide.simulator.scenario.machine_events import Presence


class MachineStay(Struct, kw_only=True):
    """One machine from its arrival to its loss, in seconds since the run's submission."""

    worker: str
    core: int
    begin_s: float
    ready_s: float | None = None  # when its worker had booted; None: it never had
    end_s: float | None = None  # None: it is there


class SpotMachines:
    """`notify` gets a line for each change. `notice_s`: between a loss's notice and the loss; 0: no notice."""

    def __init__(
        self,
        cluster: LocalCluster,
        plan: MachinePlan,
        *,
        notice_s: float,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._plan, self._notice_s, self._notify = cluster, plan, notice_s, notify
        self._clock, self._began = clock, clock()
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self.stays: list[MachineStay] = []

    async def run(self, booted: Sequence[str]) -> None:
        """Plays the plan from now on, without an end. `booted`: workers of the machines that are there already.

        Raises `LaunchFailed` if a worker cannot be started.
        """
        self._began = self._clock()
        there = [stay for stay in self._plan.stays if stay.begin_s <= 0]
        later = [stay for stay in self._plan.stays if stay.begin_s > 0]
        for core in self._plan.cores[len(booted) :]:
            self._free.put_nowait(core)
        async with asyncio.TaskGroup() as machines:
            for planned, worker, core in zip(there, booted, self._plan.cores, strict=False):
                stay = self._came(worker, core)
                stay.ready_s = 0.0
                machines.create_task(self._stay(stay, planned, None))
            for planned in later:
                await asyncio.sleep(planned.begin_s - self._now())
                core = await self._free.get()
                program = self._cluster.next_worker(core=core)
                stay = self._came(program.name, core)
                self._notify(f"a spot machine comes and boots {stay.worker}")
                machines.create_task(self._stay(stay, planned, program))

    def _now(self) -> float:
        return self._clock() - self._began

    def _came(self, worker: str, core: int) -> MachineStay:
        stay = MachineStay(worker=worker, core=core, begin_s=self._now())
        self.stays.append(stay)
        return stay

    async def _stay(self, stay: MachineStay, planned: Presence, program: Program | None) -> None:
        left_s = planned.end_s - self._notice_s - self._now()
        try:
            async with asyncio.timeout(left_s if math.isfinite(left_s) else None):
                if program is not None:
                    await self._cluster.launcher.start(program)
                    stay.ready_s = self._now()
                await asyncio.Event().wait()
        except TimeoutError:
            await self._lose(stay, planned)

    async def _lose(self, stay: MachineStay, planned: Presence) -> None:
        told = f"told that it ends in {self._notice_s:g} s" if self._notice_s else "lost without notice"
        self._notify(f"the spot machine of {stay.worker} is {told}")
        await self._cluster.launcher.retire(stay.worker, self._notice_s)
        await asyncio.sleep(planned.end_s - self._now())  # it is paid for until its end
        stay.end_s = self._now()
        self._free.put_nowait(stay.core)
