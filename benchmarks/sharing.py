"""Several runs on one fleet: what shares they get of it, measured in real time.

    python benchmarks/sharing.py [--quick] [--seconds S] [--out PATH]

The real coordinator, Redis and gRPC; the workers follow a script: each makes its tokens at one rate, whatever it
serves, and an install takes it a moment. Runs keep more rollouts open than the fleet has room for. Three scenes:

weights   three runs with weights 1:1:2
floor     a run with a floor, the least weight and the lowest priority, beside five that overload the fleet
ceiling   a run with a ceiling alone on the fleet

In none may a group be overtaken by more later ones of its run than run at once.

Prints what each run got and writes a JSON file with `figures` and the `conditions` that they hold under. Ends with 1 if
a scene missed its promise, or a token came out lost or twice.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import uvloop
from msgspec import Struct

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # run as a script, from anywhere

from benchmarks import arguments  # noqa: E402 - after the path
from benchmarks.conditions import conditions  # noqa: E402
from benchmarks.control_plane.driver import GROUP, Driver  # noqa: E402
from benchmarks.control_plane.house import House  # noqa: E402
from benchmarks.control_plane.worker import Worker  # noqa: E402
from ebbtide.types.run import ShareSpec  # noqa: E402

WORKERS: Final = 3
SLOTS: Final = 8
#: Tokens/s of a worker, whatever it serves; with all slots busy a rollout makes an eighth of it.
RATE: Final = 1000.0
INSTALL_S: Final = 0.1
#: Tokens of a response, drawn evenly: one to four seconds, so that some end and some are handed over.
LENGTHS: Final = (128, 512)
#: Rollouts that each run keeps open: so much more than the fleet has room for that some always wait.
OPEN: Final = 64
#: How far from what it was promised a share may be.
TOLERANCE: Final = 0.05
#: By how many later groups a group may be overtaken: as many as run at once.
OVERTAKEN: Final = WORKERS * SLOTS // GROUP
_WARM_S: Final = 8.0
_QUICK_S: Final = 20.0


class Scene(Struct, frozen=True):
    """`promised`: shares of the fleet; `at_least` says that more is no miss."""

    runs: Mapping[str, ShareSpec]
    promised: Mapping[str, float]
    at_least: bool = False


SCENES: Final = {
    "weights": Scene(
        {"a": ShareSpec(), "b": ShareSpec(), "c": ShareSpec(weight=2.0)}, {"a": 0.25, "b": 0.25, "c": 0.5}
    ),
    "floor": Scene(
        {
            "low": ShareSpec(weight=0.01, floor=0.25, priority=-1),
            **{f"high{number}": ShareSpec(weight=10.0, priority=1) for number in range(5)},
        },
        {"low": 0.25},
        at_least=True,
    ),
    "ceiling": Scene({"only": ShareSpec(ceiling=0.5)}, {"only": 0.5}),
}


class Pace:
    """What a worker is told of its speed; of what it tells nothing is kept but failures."""

    def __init__(self) -> None:
        self.running = 0
        self.failures: list[str] = []

    @property
    def pace(self) -> float:
        return RATE / max(1, self.running)

    def answered(self, tokens: int, seconds: float) -> None:
        pass

    def failed(self, what: str) -> None:
        self.failures.append(what)


class Stage:
    """Workers and runs at a coordinator; ends with its block."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._paces: list[Pace] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.drivers: dict[str, Driver] = {}

    async def __aenter__(self) -> "Stage":
        return self

    async def __aexit__(self, *_: object) -> None:
        for driver in self.drivers.values():
            await driver.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(self, runs: Mapping[str, ShareSpec]) -> None:
        for name, share in runs.items():
            driver = Driver(self._address, self._token, run_id=name, lengths=LENGTHS, share=share)
            self.drivers[name] = driver
            await driver.start()
            driver.want(OPEN)

    def attach(self, workers: int = WORKERS) -> None:
        for number in range(workers):
            pace = Pace()
            worker = Worker(pace, f"w{number}", self._address, self._token, SLOTS, install_s=INSTALL_S)
            self._paces.append(pace)
            self._tasks.append(asyncio.create_task(worker.run()))

    async def tokens(self, seconds: float) -> dict[str, int]:
        """What each run got in the next so many seconds."""
        before = {name: await driver.stored() for name, driver in self.drivers.items()}
        await asyncio.sleep(seconds)
        self.check()
        return {name: await driver.stored() - before[name] for name, driver in self.drivers.items()}

    def check(self) -> None:
        """Raise for what went wrong: a worker, a driver, or a token that was lost or made twice."""
        for task in self._tasks:
            if task.done():
                task.result()
        for pace in self._paces:
            if pace.failures:
                raise RuntimeError(f"refused: {pace.failures[:3]}")
        for name, driver in self.drivers.items():
            driver.check()
            if driver.lost_tokens or driver.doubled_tokens:
                raise RuntimeError(f"run {name}: {driver.lost_tokens} lost, {driver.doubled_tokens} twice")


def overtaken(groups: Sequence[str]) -> int:
    """By how many later groups a group was overtaken at most; `groups`: g0, g1, ... in the order of their ends."""
    numbers = [int(name[1:]) for name in groups]
    return max((sum(before > number for before in numbers[:at]) for at, number in enumerate(numbers)), default=0)


async def play(scene: Scene, seconds: float) -> dict[str, Any]:
    """One scene on a coordinator of its own."""
    async with House() as house, Stage(house.address, house.token) as stage:
        await stage.submit(scene.runs)
        stage.attach()
        await asyncio.sleep(_WARM_S)
        tokens = await stage.tokens(seconds)
        groups = {name: driver.groups for name, driver in stage.drivers.items()}
    capacity = RATE * WORKERS * seconds
    # Shares of what was made; of a fleet on which rest is to be had, of what could have been.
    whole = (
        capacity if sum(share.ceiling or 1.0 for share in scene.runs.values()) < 1.0 else float(sum(tokens.values()))
    )
    shares = {name: count / whole for name, count in tokens.items()}
    off = {name: shares[name] / promised - 1.0 for name, promised in scene.promised.items()}
    kept = all(one >= -TOLERANCE and (scene.at_least or one <= TOLERANCE) for one in off.values())
    return {
        "seconds": seconds,
        "tokens": tokens,
        "shares": {name: round(share, 4) for name, share in shares.items()},
        "promised": dict(scene.promised),
        "off": {name: round(one, 4) for name, one in off.items()},
        "kept": kept and all(tokens.values()) and all(overtaken(one) <= OVERTAKEN for one in groups.values()),
        "used": round(sum(tokens.values()) / capacity, 4),
        "groups_ended": {name: len(one) for name, one in groups.items()},
        "overtaken_by": {name: overtaken(one) for name, one in groups.items()},
    }


async def measure(seconds: float) -> dict[str, Any]:
    found = {}
    for name, scene in SCENES.items():
        found[name] = one = await play(scene, seconds)
        shares = ", ".join(f"{run} {share:.1%}" for run, share in one["shares"].items())
        print(
            f"{name:10} {shares}; {one['used']:.0%} of the fleet used; {'kept' if one['kept'] else 'MISSED'}",
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="What shares of a fleet several runs get.")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_S:g} s a scene")
    parser.add_argument("--seconds", type=arguments.factor, default=60.0, help="of each scene")
    parser.add_argument("--out", type=arguments.output, help="the JSON file")
    options = parser.parse_args()
    options.out = options.out or arguments.result("sharing", quick=options.quick)
    figures = uvloop.run(measure(_QUICK_S if options.quick else options.seconds))
    setup = {
        "workers": WORKERS, "slots": SLOTS, "tokens_per_s_of_a_worker": RATE, "install_s": INSTALL_S,
        "response_tokens": LENGTHS, "open_rollouts_of_a_run": OPEN, "group": GROUP, "workers_are": "scripted",
    }  # fmt: skip
    text = json.dumps({"figures": figures, "setup": setup, "conditions": conditions()}, indent=1)
    options.out.write_text(text + "\n")
    return 0 if all(one["kept"] for one in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
