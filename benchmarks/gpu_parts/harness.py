"""Runs the parts of a half, each in a process of its own with its own limit, and writes what is known after each.

A part is a function that takes a `PartRun`. It tells figures as it finds them, so that one that fails or runs out of
time leaves those that it had. A part that cannot run here raises `PartSkipped` with the reason.

Invariant: the report on disk is whole JSON at any moment, and has every part that has ended. A part's process is gone,
with all that it started, before the next part begins.
"""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from benchmarks.conditions import conditions

ROOT: Final = Path(__file__).parents[2]
#: Where the packages lie, for machines on which Ebbtide is not installed.
PACKAGES: Final = tuple(str(ROOT / name) for name in ("", "common", "services", "lab"))
#: Lines of a failed part's output that the report keeps.
_LAST_LINES: Final = 40
#: A part with less time than this is not begun.
_LEAST_S: Final = 10.0
#: Exit status of a part that cannot run here.
_SKIPPED: Final = 3
#: Room in shared memory from which on checkpoints are made there.
_SHARED_BYTES: Final = 48 << 30


class PartSkipped(Exception):
    """The part cannot run here; its text says why."""


class Part(Struct, frozen=True, kw_only=True):
    """One question to a GPU. `work` is `module:function`, loaded in the part's process alone."""

    name: str
    work: str
    limit_s: float
    answers: str
    needs_gpu: bool = False  # has nothing to say on a CPU


class Half(Struct, frozen=True, kw_only=True):
    """Parts that need the same things installed. They end within `limit_s`, whatever each of them takes."""

    name: str
    parts: tuple[Part, ...]
    limit_s: float


#: What is asked before all parts.
_DEVICE: Final = Part(
    name="device", work="benchmarks.gpu_parts.harness:device", limit_s=60, answers="the card and the versions"
)


class PartRun:
    """What a part's function works with, in the part's process."""

    def __init__(self, told: Path, *, device: str, small: bool, models: Path, limit_s: float) -> None:
        """`told`: the file of its figures. `models`: a folder of checkpoints that all parts share."""
        self.device, self.small, self.models = device, small, models
        self.figures: dict[str, Any] = {}
        self._told, self._end = told, time.monotonic() + limit_s
        self.folder = told.parent / told.stem
        self.folder.mkdir()

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def left_s(self) -> float:
        """Seconds until this part is ended."""
        return self._end - time.monotonic()

    def tell(self, **figures: Any) -> None:
        """Adds figures; they count even if the part fails later."""
        self.figures |= figures
        write_json(self._told, self.figures)


class PartOutcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    outcome: str  # ran, skipped or failed
    seconds: float
    figures: dict[str, Any] = {}
    reason: str = ""  # of a skipped or failed one
    error: tuple[str, ...] = ()  # the last lines of what a failed one printed


def run_half(half: Half, out: Path, *, device: str, small: bool, only: Sequence[str] = ()) -> int:
    """Runs the parts (those named in `only`, if any) and writes `out` after each. Returns the exit status: 1 if a part
    failed."""
    parts = [part for part in half.parts if not only or part.name in only]
    report: dict[str, Any] = {"half": half.name, "small": small, "conditions": conditions()}
    report |= {"planned": [part.name for part in parts], "parts": {}}
    end = time.monotonic() + half.limit_s
    with tempfile.TemporaryDirectory(prefix="ebbtide-gpu-", dir=_roomy_folder(small=small)) as folder:
        runner = PartRunner(Path(folder), device=device, small=small)
        report["device"] = runner.outcome(_DEVICE, _DEVICE.limit_s).figures
        write_json(out, report)
        for part in parts:
            found = runner.outcome(part, min(part.limit_s, end - time.monotonic()))
            report["parts"][part.name] = found
            write_json(out, report)
            _print(part, found)
    print(f"written: {out}")
    return int(any(found.outcome == "failed" for found in report["parts"].values()))


class PartRunner:
    """Starts parts as processes: `python benchmarks/gpu.py part WORK ...`. Everything of theirs lies in `folder`."""

    def __init__(self, folder: Path, *, device: str, small: bool) -> None:
        self._folder, self._device, self._small = folder, device, small
        self.models = folder / "models"
        self.models.mkdir()

    def outcome(self, part: Part, limit_s: float) -> PartOutcome:
        if part.needs_gpu and self._device == "cpu":
            return PartOutcome(outcome="skipped", seconds=0.0, reason="needs a GPU")
        if limit_s < _LEAST_S:
            return PartOutcome(outcome="skipped", seconds=0.0, reason="the parts before it took all the time")
        told, log = self._folder / f"{part.name}.json", self._folder / f"{part.name}.log"
        began = time.monotonic()
        status = self._run(part, told, log, limit_s)
        seconds = round(time.monotonic() - began, 2)
        figures = json.loads(told.read_text()) if told.exists() else {}
        lines = log.read_text(errors="replace").splitlines()
        shutil.rmtree(told.with_suffix(""), ignore_errors=True)  # frees the memory of shared folders
        if status == 0:
            return PartOutcome(outcome="ran", seconds=seconds, figures=figures)
        if status == _SKIPPED:
            return PartOutcome(outcome="skipped", seconds=seconds, figures=figures, reason=lines[-1] if lines else "")
        reason = f"ended with status {status}" if status is not None else f"had no end within {limit_s:.0f} s"
        error = tuple(lines[-_LAST_LINES:])
        return PartOutcome(outcome="failed", seconds=seconds, figures=figures, reason=reason, error=error)

    def _run(self, part: Part, told: Path, log: Path, limit_s: float) -> int | None:
        """Returns the exit status; None: the time ran out. Nothing of the process is left in either case."""
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "part", part.work]
        command += ["--told", str(told), "--models", str(self.models), "--device", self._device]
        command += ["--limit", str(limit_s), *(["--small"] if self._small else [])]
        paths = [*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError):  # its engines and services, too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_part(work: str, run: PartRun) -> int:
    """Runs one part's function in this process. Returns its exit status."""
    from ebbtide.runtime import die_with_parent

    die_with_parent(os.getppid())
    module, _, name = work.partition(":")
    function: Callable[[PartRun], None] = getattr(importlib.import_module(module), name)
    try:
        function(run)
    except PartSkipped as reason:
        print(reason)
        return _SKIPPED
    return 0


def device(run: PartRun) -> None:
    """Tells what all figures hang on: the card and the versions of torch and CUDA. A part, so that the process that
    waits for the others holds no memory of the card."""
    import torch

    run.tell(kind=run.device, torch=str(torch.__version__))
    if run.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        run.tell(name=properties.name, bytes=properties.total_memory, count=torch.cuda.device_count())
        run.tell(capability=f"{properties.major}.{properties.minor}", cuda=torch.version.cuda)


def write_json(path: Path, body: Any) -> None:
    """Replaces a file as a whole."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(msgspec.to_builtins(body), indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def _roomy_folder(*, small: bool) -> str | None:
    """Shared memory if it has room for the largest checkpoints: a disk would be measured along with the rest."""
    shared = Path("/dev/shm")  # noqa: S108 - a folder of this process alone is made in it
    roomy = not small and shared.is_dir() and shutil.disk_usage(shared).free >= _SHARED_BYTES
    return str(shared) if roomy else None


def _print(part: Part, found: PartOutcome) -> None:
    print(f"{found.outcome:8} {found.seconds:7.1f} s  {part.name}: {found.reason or part.answers}", flush=True)
    for line in found.error:
        print(f"    {line}")
    for name, value in found.figures.items():
        print(f"    {name}: {json.dumps(value)[:160]}", flush=True)
