"""Ranks of one host live and end together, and the one at fault is named with what it said last."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from ebbtide.runtime import Shutdown
from ebbtide.trainer.ranks import rank_launcher as module
from ebbtide.trainer.ranks.rank_launcher import RankLost, launch
from ebbtide.trainer.settings import TrainerSettings
from tests.support.waiting import wait_until

SETTINGS = TrainerSettings(ranks=3)
PATIENT = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); time.sleep(100)"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """What each rank's process is instead of a trainer; those it started are in `started`."""
    given: dict[int, str] = {}

    async def start(number: int, size: int, meeting: Any, argv: Sequence[str]) -> asyncio.subprocess.Process:
        assert size == 3
        command = [sys.executable, "-c", given[number]]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        STARTED.append(process)
        return process

    STARTED.clear()
    monkeypatch.setattr(module, "_start", start)
    monkeypatch.setattr(module, "_GRACE_S", 0.2)
    monkeypatch.setattr(module, "_PART_S", 5.0)
    return given


STARTED: list[asyncio.subprocess.Process] = []


def all_gone() -> bool:
    return len(STARTED) == 3 and all(process.returncode is not None for process in STARTED)


@pytest.mark.parametrize("last", [0, 2])
async def test_all_that_end_well_in_any_order_end_the_trainer_well(last: int, scripts: dict[int, str]) -> None:
    scripts |= dict.fromkeys(range(3), "pass") | {last: "import time; time.sleep(0.5)"}
    await launch(SETTINGS, [], Shutdown("trainer", SETTINGS))
    assert all_gone()


async def test_a_rank_0_that_is_frozen_as_it_is_asked_to_end_is_not_waited_for(
    scripts: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PART_S", 0.2)
    notices = "import time; time.sleep(3.0); exit(1)"  # as ranks do that hear nothing of it any more
    scripts |= {0: "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", 1: notices, 2: notices}
    shutdown = Shutdown("trainer", SETTINGS)
    launching = asyncio.create_task(launch(SETTINGS, [], shutdown))
    await wait_until(lambda: len(STARTED) == 3, timeout=10)
    await wait_until(lambda: psutil.Process(STARTED[0].pid).status() == psutil.STATUS_STOPPED, timeout=10)
    shutdown.requested.set()
    await asyncio.wait_for(launching, 20)
    assert all_gone()


async def test_a_rank_that_fails_is_named_with_its_last_words_and_ends_the_others(scripts: dict[int, str]) -> None:
    told = "import sys; sys.stderr.write('one\\n' * 9 + 'no memory left\\n'); sys.exit(3)"
    scripts |= {0: PATIENT, 1: told, 2: PATIENT}
    with pytest.raises(RankLost, match=r"(?s)rank 1 of 3 ended with status 3.*no memory left") as caught:
        await launch(SETTINGS, [], Shutdown("trainer", SETTINGS))
    assert str(caught.value).count("one") == 4
    assert all_gone()


async def test_a_rank_that_says_much_without_a_line_end_is_read_to_its_end(scripts: dict[int, str]) -> None:
    told = "import sys; sys.stderr.write('.' * (1 << 21) + ' no memory left'); sys.stderr.flush(); sys.exit(3)"
    scripts |= {0: PATIENT, 1: told, 2: PATIENT}
    with pytest.raises(RankLost, match=r"(?s)rank 1 of 3 ended with status 3.*no memory left"):
        await launch(SETTINGS, [], Shutdown("trainer", SETTINGS))
    assert all_gone()


async def test_a_rank_that_is_killed_is_named_with_the_signal(scripts: dict[int, str]) -> None:
    scripts |= {0: PATIENT, 1: PATIENT, 2: "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"}
    with pytest.raises(RankLost, match="rank 2 of 3 was killed by SIGKILL"):
        await launch(SETTINGS, [], Shutdown("trainer", SETTINGS))
    assert all_gone()


async def test_a_rank_that_does_not_end_with_rank_0_is_named(scripts: dict[int, str]) -> None:
    scripts |= {0: "pass", 1: "pass", 2: PATIENT}
    with pytest.raises(RankLost, match="rank 2 of 3 did not end"):
        await launch(SETTINGS, [], Shutdown("trainer", SETTINGS))
    assert all_gone()


async def test_who_asks_the_trainer_to_end_asks_rank_0(scripts: dict[int, str]) -> None:
    ready = "import sys; sys.stderr.write('up\\n'); sys.stderr.flush();"
    scripts |= {0: ready + PATIENT, 1: "import time; time.sleep(100)", 2: "import time; time.sleep(100)"}
    shutdown: Any = Shutdown("trainer", SETTINGS)
    running = asyncio.create_task(launch(SETTINGS, [], shutdown))
    await wait_until(lambda: len(STARTED) == 3)
    await asyncio.sleep(0)
    shutdown.requested.set()
    await asyncio.wait_for(running, 20)
    assert STARTED[0].returncode in {0, -signal.SIGTERM}
    assert [process.returncode for process in STARTED[1:]] == [-signal.SIGKILL] * 2
