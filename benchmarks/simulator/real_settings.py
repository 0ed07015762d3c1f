"""Measures real runs on this machine, to be compared with simulated ones.

    python -m benchmarks.simulator.real_settings [--quick] [--settings NAME ...] [--steps N] [--seed N] [--out PATH]
                                                 [--resume]

Boots one cluster on two declared cores, and measures one setting after another on it. Before each of them, and behind
the last one, profile blocks observe how fast engine and trainer are on other work. Writes a JSON file after each
setting: an interrupted benchmark leaves what it has measured, and goes on from there with --resume.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks import arguments
from benchmarks.conditions import conditions
from benchmarks.real_time import real_time
from benchmarks.simulator.bound_fleet import TURNS, BoundFleet, bound_fleet
from benchmarks.simulator.core_slices import SLICE_S
from benchmarks.simulator.measured import Measured
from benchmarks.simulator.profile_block import GRID, QUICK_GRID, EngineBlock, engine_block
from benchmarks.simulator.real_run import run_setting
from benchmarks.simulator.served_users import served_users
from benchmarks.simulator.setting import QUICK, SETTINGS, RealSetting
from ebbtide.cli.interrupts import INTERRUPTED
from ebbtide.cli.interrupts import run as run_interruptible
from ebbtide.client import Client
from ebbtide.runtime import write_atomically

ROOT: Final = Path(__file__).parents[2]
CACHE: Final = ROOT / "runs" / "bench-simulator"
#: Runs whose steps the trainer's profile, installs and delays are fitted to: many short samples, few long ones, and
#: some between, so that costs per token and per pair of tokens can be told apart. Judged settings have other sizes.
_TRAINED: Final = (
    RealSetting(name="profile: many short", workers=2, prompts=24, stops=7, cap=64, prompt_tokens=32, steps=4),
    RealSetting(name="profile: few long", workers=1, prompts=3, stops=0, cap=512, prompt_tokens=128, steps=4),
    RealSetting(name="profile: medium", workers=2, prompts=12, stops=2, cap=256, prompt_tokens=96, steps=4),
)
Tell = Callable[[str], None]


class ProfileBlock(Struct, frozen=True, kw_only=True):
    """All observations of one block. Steps of `trained` say what the trainer takes, and installs what they take."""

    engine: EngineBlock
    trained: list[Measured] = []


class RealSession(Struct, kw_only=True):
    """What one session of the benchmark measured, in order: a block, a setting, a block, and so on."""

    seed: int
    quick: bool
    conditions: dict[str, Any]
    blocks: list[ProfileBlock] = []
    settings: list[Measured] = []
    boots_s: list[float] = []  # of workers, up to two at the same time


class RealMeasuring:
    """Measures settings and blocks on one fleet, and keeps `session` on disk."""

    def __init__(self, fleet: BoundFleet, client: Client, session: RealSession, out: Path, tell: Tell) -> None:
        self._fleet, self._client, self._out, self._tell = fleet, client, out, tell
        self.session = session
        self._began = time.monotonic()
        self._runs = 0
        self._boots_before = list(session.boots_s)

    async def all(self, settings: Sequence[RealSetting]) -> None:
        for setting in settings:
            if setting.served:
                await self._served(setting)
                continue
            await self._block()
            await self._fleet.arrange(self._client, setting.workers, setting.spares)
            self._keep(await self._run(setting))
        if any(not setting.served for setting in settings):
            await self._block()
            self._write()

    async def _block(self) -> None:
        """Observes one worker's engine, then the trainer on steps of several sizes; if quick, on one size in turn."""
        await self._fleet.arrange(self._client, 1)
        engine = await self._engine(whole_core=False)
        trained = []
        turn = len(self.session.blocks) % len(_TRAINED)
        for setting in _TRAINED[turn : turn + 1] if self.session.quick else _TRAINED:
            await self._fleet.arrange(self._client, setting.workers)
            trained.append(await self._run(setting))
        self.session.blocks.append(ProfileBlock(engine=engine, trained=trained))

    async def _served(self, setting: RealSetting) -> None:
        """Measures a borrowed worker: its engine without users before and after, and the setting beside users."""
        fleet, client = self._fleet, self._client
        await fleet.arrange(client, 0)
        async with served_users(fleet, CACHE, self.session.seed) as users:
            await fleet.borrow(client, users.grants)
            async with users.guarded() as url:
                self.session.blocks.append(ProfileBlock(engine=await self._engine(whole_core=True)))
                async with users.sending(url):
                    measured = await self._run(setting)
                self.session.blocks.append(ProfileBlock(engine=await self._engine(whole_core=True)))
            fleet.kill(fleet.present[0])
            self._keep(replace(measured, served=msgspec.to_builtins(users.record)))

    async def _engine(self, *, whole_core: bool) -> EngineBlock:
        self._tell("profile block")
        grid = QUICK_GRID if self.session.quick else GRID
        at_s = time.monotonic() - self._began
        return await engine_block(self._fleet, self._client, self._name(), grid=grid, at_s=at_s, whole_core=whole_core)

    async def _run(self, setting: RealSetting) -> Measured:
        began = time.monotonic()
        measured = await run_setting(self._fleet, self._client, setting, self._name(), self.session.seed)
        self._tell(
            f"{setting.name}: {len(measured.steps)} steps in {time.monotonic() - began:.0f} s, "
            f"median {measured.median_step_s:.2f} s; other programs took {measured.load['others']:.0%} of the cores"
        )
        return measured

    def _name(self) -> str:
        self._runs += 1
        return f"r{self._runs}"

    def _keep(self, measured: Measured) -> None:
        self.session.settings.append(measured)
        self._write()

    def _write(self) -> None:
        self.session.boots_s = [*self._boots_before, *self._fleet.boots_s]
        write_atomically(self._out, msgspec.json.format(msgspec.json.encode(self.session), indent=1).decode() + "\n")


async def measure(
    settings: Sequence[RealSetting],
    *,
    quick: bool,
    seed: int,
    out: Path,
    tell: Tell,
    directory: Path | None = None,
    begun: RealSession | None = None,
) -> RealSession:
    """Measures the settings, and writes the session to `out`. Logs stay in `directory`, if one is given. `begun`: a
    session to go on with, which keeps what it has.

    Call it from the main thread. Raises `EbbtideError`, or what a program failed with.
    """
    with tempfile.TemporaryDirectory(prefix="ebb-real-") as temporary, real_time() as permitted:
        if not permitted:
            tell("A real-time class is not permitted here: programs beside this one will show in the figures")
        async with bound_fleet(directory or Path(temporary), seed) as (fleet, client):
            bound = {"engine_core": fleet.engine_core, "other_core": fleet.other_core, "real_time": permitted}
            under = conditions() | bound | {"turns": TURNS, "timeslice_s": SLICE_S}
            session = begun or RealSession(seed=seed, quick=quick, conditions=under)
            tell(f"engines on core {fleet.engine_core} in {TURNS} turns, all else on core {fleet.other_core}")
            await RealMeasuring(fleet, client, session, out, tell).all(settings)
    return session


def read_session(path: Path) -> RealSession:
    """Reads a session that `measure` wrote. Raises `msgspec.DecodeError` or `OSError`."""
    return msgspec.json.decode(path.read_bytes(), type=RealSession)


def chosen(quick: bool, names: Sequence[str], steps: int | None) -> list[RealSetting]:
    """Selects settings by name, all of them without names. Raises `ValueError` for an unknown name."""
    known = {setting.name: setting for setting in (QUICK if quick else SETTINGS)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{', '.join(unknown)}: no such setting; there are {', '.join(known)}")
    found = [known[name] for name in names or known]
    return [shortened(setting, steps) for setting in found] if steps else found


def shortened(setting: RealSetting, steps: int) -> RealSetting:
    """Returns the setting with so many steps, and the interruptions that fall into them."""
    kept = tuple(one for one in setting.interruptions if one.step < steps)
    return replace(setting, steps=steps, interruptions=kept)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two settings of ten steps, smaller blocks")
    parser.add_argument("--settings", nargs="+", default=[], metavar="NAME", help="some of them; default: all")
    parser.add_argument("--steps", type=arguments.count, help="of each setting, for a try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where logs stay; must be empty")
    parser.add_argument("--out", type=arguments.output)
    parser.add_argument("--resume", action="store_true", help="measure what the file of --out does not have yet")
    options = parser.parse_args(argv)
    options.out = options.out or arguments.result("simulator_real", quick=options.quick)
    try:
        settings = chosen(options.quick, options.settings, options.steps)
    except ValueError as error:
        parser.error(f"--settings: {error}")
    begun = read_session(options.out) if options.resume and options.out.exists() else None
    if begun is not None:
        settings = [one for one in settings if one.name not in {had.setting.name for had in begun.settings}]

    async def run() -> int:
        given: dict[str, Any] = {
            "quick": options.quick,
            "seed": options.seed,
            "out": options.out,
            "directory": options.directory,
            "begun": begun,
        }
        await measure(settings, **given, tell=partial(print, flush=True))
        return 0

    status = run_interruptible(run)
    if status == INTERRUPTED:
        print("Interrupted; all processes are gone", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
