"""The whole fleet at work: it arrives, idles, is filled, works, loses half of its workers, and its coordinator."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from benchmarks.control_plane.driver import Driver
from benchmarks.control_plane.measures import spread
from benchmarks.scale.plan import ScalePlan
from benchmarks.scale.stored_tokens import tokens_missing
from benchmarks.scale.town import Town
from tests.support.waiting import wait_until

Tell = Callable[[str], None]
#: Of all slots: the last ones are free again and again, as rollouts end.
_FULL: Final = 0.98
_PATIENCE_S: Final = 240.0
#: Kinds of the coordinator's warnings.
_TOLD: Final = 12
#: Between two steps of a growing load.
_STEP_S: Final = 0.5
#: Between two words on how far it is.
_TELL_S: Final = 10.0


class Crowd:
    """`figures` grow with each phase; `phases` has what the coordinator's loop did in each."""

    def __init__(self, town: Town, plan: ScalePlan, tell: Tell) -> None:
        self._town, self._plan, self._tell = town, plan, tell
        self._drivers: list[Driver] = []
        self.figures: dict[str, Any] = {"workers": plan.workers, "takeovers_unasked": 0}
        self.phases: dict[str, Any] = {}
        self._asked: set[str] = set()  # workers that were to be lost
        self._missing = self._refused = 0  # tokens: acknowledged and not stored; acknowledged, and then said to lack
        self._told = self._late_s = 0.0  # by which the loop of a workers' process was late
        self._own, self._own_since = time.process_time(), time.monotonic()
        self._cpu: tuple[float, tuple[float, float]] | None = None

    async def run(self) -> None:
        try:
            phases = (
                *(self._arrive, self._idle, self._fill, self._work),
                *(self._fall_silent, self._lose_half, self._take_over),
            )
            for phase in phases:
                await self._town.ask("read")
                began = time.monotonic()
                name = phase.__name__.strip("_")
                try:
                    await phase()
                except TimeoutError as error:
                    self.figures[f"{name}_failed"] = str(error)
                if ended := await self._town.mend():
                    self.figures["takeovers_unasked"] += ended - (phase == self._take_over)
                seen = self.phases[name] = await self._town.ask("read")
                seen["workers_lost_unasked"] = len(self._lost - self._asked)
                self._note(await self._town.everywhere("measure"))
                seen["workers_longest_lag_s"], self._late_s = round(self._late_s, 2), 0.0
                for driver in self._drivers:
                    driver.check()
                self._tell(f"{name}: {time.monotonic() - began:.1f} s, longest {seen['longest'][:3]}")
            self._conclude()
        finally:
            await asyncio.gather(*(driver.close() for driver in self._drivers))

    async def _arrive(self) -> None:
        plan = self._plan
        for number in range(plan.runs):
            self._drivers.append(driver := self._town.driver(number, lengths=plan.lengths, kind=Driver))
            await driver.start()
        began = time.monotonic()
        found = await self._everywhere_workers("arrive", slots=plan.slots, within_s=plan.arrive_s)
        self.figures["all_attached_s"] = round(time.monotonic() - began, 2)
        self.figures["never_attached"] = sum(one["missing"] for one in found)

    async def _everywhere_workers(self, do: str, **more: Any) -> list[dict[str, Any]]:
        """Give each process its part of the workers."""
        processes = len(self._town.fleets)
        parts = {self._plan.workers // processes}
        if len(parts) != 1 or self._plan.workers % processes:
            raise ValueError("workers must be a multiple of fleets")
        return await self._town.everywhere(do, workers=parts.pop(), **more)

    async def _idle(self) -> None:
        before, began = self._town.cpu(), time.monotonic()
        await asyncio.sleep(self._plan.idle_s)
        seconds = time.monotonic() - began
        used = [now - then for now, then in zip(self._town.cpu(), before, strict=True)]
        self.figures["cpu_s_per_idle_second"] = round(sum(used) / seconds, 3)

    async def _fill(self) -> None:
        plan = self._plan
        await self._town.everywhere("pace", rate=plan.rate / len(self._town.fleets))
        began = time.monotonic()
        await self._submit(plan.live, plan.starts_per_s)
        await self._submit(plan.live + plan.queued, plan.submits_per_s)
        for name, done in (("all_submitted_s", self._submitted), ("slots_filled_s", self._full)):
            self.figures[name] = None
            with suppress(TimeoutError):
                await wait_until(done, timeout=plan.fill_s - (time.monotonic() - began), interval=0.5)
                self.figures[name] = round(time.monotonic() - began, 1)
        self.figures["running"] = await self._running()

    async def _submit(self, rollouts: int, per_s: float) -> None:
        """Have so many rollouts open in all: more and more, so many a second."""
        before, began = sum(driver.open for driver in self._drivers), time.monotonic()
        while (want := min(rollouts, before + round(per_s * (time.monotonic() - began)))) < rollouts:
            self._want(want)
            await self._running()
            await asyncio.sleep(_STEP_S)
        self._want(rollouts)

    def _want(self, rollouts: int) -> None:
        for number, driver in enumerate(self._drivers):
            driver.want(_part(rollouts, self._plan.runs, number))

    async def _full(self) -> bool:
        return await self._running() >= _FULL * self._plan.live

    async def _running(self) -> int:
        for driver in self._drivers:
            driver.check()
        seen = await self._town.everywhere("measure")
        self._note(seen)
        running = sum(one["running"] for one in seen)
        if (now := time.monotonic()) > self._told + _TELL_S:
            self._told = now
            ended = sum(driver.finished for driver in self._drivers)
            lost = len(self._lost)
            shares = [f"{sum(one['cpu_s'] / one['seconds'] for one in seen):.2f}"]
            shares.append(f"{(time.process_time() - self._own) / (now - self._own_since):.2f}")
            self._own, self._own_since = time.process_time(), now
            if self._cpu:
                span = now - self._cpu[0]
                shares += [f"{(a - b) / span:.2f}" for a, b in zip(self._town.cpu(), self._cpu[1], strict=True)]
            self._cpu = (now, self._town.cpu())
            self._tell(
                f"{running:,} rollouts run, {ended:,} have finished, {lost} workers were lost; cores of workers, "
                f"drivers, coordinator and Redis: {', '.join(shares)}; workers' loops were late by {self._late_s:.2f} s"
            )
        return int(running)

    def _submitted(self) -> bool:
        return sum(len(driver.unfinished) for driver in self._drivers) >= self._plan.live + self._plan.queued * _FULL

    async def _work(self) -> None:
        await asyncio.sleep(min(5.0, self._plan.steady_s))  # messages that piled up while slots were filled
        await self._town.everywhere("measure")
        await self._town.ask("read")
        before, began = self._town.cpu(), time.monotonic()
        await asyncio.sleep(self._plan.steady_s)
        used = [now - then for now, then in zip(self._town.cpu(), before, strict=True)]
        seen, seconds = await self._town.everywhere("measure"), time.monotonic() - began
        tokens = max(1, sum(one["tokens"] for one in seen))
        acks = spread([value for one in seen for value in one["answers"]], "ms", 1e3)
        refills = spread([value for one in seen for value in one["refills"]], "ms", 1e3)
        self.figures |= {
            "fleet_tokens_per_s": round(tokens / seconds),
            "fleet_messages_per_s": round(acks["count"] / seconds),
            "fleet_cpu_s_per_million_tokens": round(sum(used) / tokens * 1e6, 2),
            "fleet_coordinator_cpu_share": round(used[0] / seconds, 3),
            "fleet_redis_cpu_share": round(used[1] / seconds, 3),
            "fleet_load_cpu_share": round(sum(one["cpu_s"] for one in seen) / seconds, 3),
            "fleet_ack_p50_ms": acks["p50_ms"],
            "fleet_ack_p99_ms": acks["p99_ms"],
            "placement_p50_ms": refills["p50_ms"],
            "placement_p99_ms": refills["p99_ms"],
            "placements": refills["count"],
        }
        self._note(seen)

    def _note(self, seen: list[dict[str, Any]]) -> None:
        for failure in [text for one in seen for text in one["failures"]][:3]:
            self._tell(f"workers report: {failure}")
        self._refused = sum(int(one["lost_tokens"]) for one in seen)
        self._late_s = max(self._late_s, *(one["longest_lag_s"] for one in seen))

    @property
    def _lost(self) -> set[str]:
        """Workers that the coordinator took for lost."""
        return set[str]().union(*(driver.lost for driver in self._drivers))

    async def _fall_silent(self) -> None:
        """Some workers stop without a word, with their streams open."""
        notices = []
        for _ in range(self._plan.silenced):
            at = time.monotonic()
            names = {one["worker"] for one in await self._town.everywhere("silence")}
            self._asked |= names
            await wait_until(lambda: names <= self._lost, timeout=_PATIENCE_S, interval=0.05, what="silent workers")  # noqa: B023 - it is awaited here
            noticed = [driver.lost[name] for driver in self._drivers for name in names & driver.lost.keys()]
            notices.append(max(noticed) - at)
        self.figures["longest_death_notice_s"] = round(max(notices), 2)

    async def _lose_half(self) -> None:
        """Half of the workers vanish; others come in place of all that were lost, and go on with what those had."""
        plan = self._plan
        acknowledged = await self._acknowledged()
        lost = await self._town.everywhere("vanish", share=0.5)
        at = min(one["at"] for one in lost)
        names = {name for one in lost for name in one["workers"]}
        self._asked |= names
        await wait_until(lambda: names <= self._lost, timeout=_PATIENCE_S, interval=0.05, what="all losses noticed")
        self.figures["half_lost_noticed_s"] = round(time.monotonic() - at, 2)
        self._missing += await tokens_missing(self._town.redis, acknowledged)
        each = round(len(self._asked) / len(self._town.fleets))
        await self._town.everywhere("arrive", workers=each, slots=plan.slots, within_s=plan.arrive_s / 2)
        again = partial(self._reach, self.figures["running"])
        self.figures["half_lost_full_again_s"] = None
        with suppress(TimeoutError):
            await wait_until(again, timeout=plan.fill_s, interval=0.1)
            self.figures["half_lost_full_again_s"] = round(time.monotonic() - at, 2)

    async def _reach(self, running: int) -> bool:
        return await self._running() >= _FULL * running

    async def _acknowledged(self) -> dict[str, tuple[str, int]]:
        """Run and acknowledged tokens of each rollout that workers hold, or held when they vanished."""
        found: dict[str, tuple[str, int]] = {}
        for one in await self._town.everywhere("held"):
            for rollout, (run, count) in one["held"].items():
                found[rollout] = (run, max(count, found.get(rollout, ("", 0))[1]))
        return found

    async def _take_over(self) -> None:
        """The leading coordinator is killed, again and again; each time the other one takes over."""
        found, terms = [], set[bytes]()
        watching = asyncio.create_task(self._town.note_terms(terms))
        for number in range(self._plan.kills):
            if number:
                await self._town.mend()  # the killed one comes back as the standby
            await wait_until(lambda: len(terms) > number, timeout=_PATIENCE_S, interval=0.05, what="its term")  # noqa: B023 - it is awaited here
            found.append(await self._kill(number))
            await asyncio.sleep(self._plan.watched_s)
        watching.cancel()
        self.figures |= {name: round(max(one[name] for one in found), 2) for name in found[0]}
        self.figures["takeovers"] = [one["takeover_s"] for one in found]
        self.figures["terms_per_kill"] = (len(terms) - 1) / len(found)
        self.figures["lease_lapses_after_takeover"] = self._town.lapses()
        self._note(await self._town.everywhere("measure"))

    async def _kill(self, number: int) -> dict[str, float]:
        """Kill the leader; how long what took, in seconds."""
        town = self._town
        acknowledged = await self._acknowledged()
        struck = await town.kill_leader()
        self._want(self._plan.live + self._plan.queued + (number + 1) * self._plan.runs)
        recovered = asyncio.create_task(town.everywhere("recover", after=struck))
        await wait_until(partial(self._resubmitted, struck), timeout=_PATIENCE_S, interval=0.02, what="a submission")
        submitted = min(d.submitted[1] for d in self._drivers if d.submitted[0] > struck) - struck
        back = await recovered
        append = min(one["answered"] for one in back) - struck
        self._missing += await tokens_missing(town.redis, acknowledged)
        return {
            "takeover_s": max(submitted, append),
            "takeover_submit_s": submitted,
            "takeover_append_s": append,
            "takeover_all_attached_s": max(one["last"] for one in back) - struck,
            "takeover_never_attached": sum(one["missing"] for one in back),
        }

    def _resubmitted(self, after: float) -> bool:
        return any(driver.submitted[0] > after for driver in self._drivers)

    def _conclude(self) -> None:
        phases = self.phases.values()
        warnings = self._town.warnings()
        self.figures["warnings"] = dict(warnings.most_common(_TOLD))
        balancing = self.phases["work"]["spent_s"].get("balancing", 0.0) / self.phases["work"]["seconds"]
        lost = self._missing + self._refused + sum(driver.lost_tokens for driver in self._drivers)
        self.figures |= {
            "workers_lost_unasked": max(one["workers_lost_unasked"] for one in phases),
            "callback_p99_ms": max(one["callbacks"]["p99_ms"] for one in phases),
            "callback_max_ms": max(one["callbacks"]["max_ms"] for one in phases),
            "longest_callback_p99_ms": max(one["stretches"]["p99_ms"] for one in phases),
            "decision_p99_ms": max(one["decisions"]["p99_ms"] for one in phases),
            "decision_max_ms": max(one["decisions"]["max_ms"] for one in phases),
            "collector_max_ms": max(one["collections"]["max_ms"] or 0.0 for one in phases),
            "balancing_core_share": round(balancing, 3),
            "tokens_lost": lost,
            "tokens_doubled": sum(driver.doubled_tokens for driver in self._drivers),
            "rollouts_checked": sum(driver.finished for driver in self._drivers),
        }


def _part(total: int, parts: int, number: int) -> int:
    """Part `number` of so many, as even as can be."""
    return total // parts + (number < total % parts)
