"""Whose the cores were: ours and those of the processes below us, or others'."""

import subprocess
import sys

from ebbtide.demo.foreign_load import CoreUse, cores, share_of_others

BUSY = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
#: The system counts in ticks of a hundredth, and rounds each of the times that are added.
TICKS_S = 0.1


def test_what_programs_below_this_one_took_is_its_own_while_they_run_and_behind_their_end() -> None:
    begin = cores()
    running = subprocess.Popen([sys.executable, "-c", f"{BUSY}\nprint(flush=True)\ninput()"], stdin=-1, stdout=-1)
    assert running.stdout is not None
    running.stdout.readline()
    middle = cores()
    running.communicate(b"\n")
    end = cores()
    assert middle.own_s - begin.own_s >= 0.5 - TICKS_S
    assert end.own_s >= middle.own_s


def test_others_take_what_is_not_ours_of_all_cores() -> None:
    begin = CoreUse(0.0, 100.0, 50.0)
    assert share_of_others(begin, CoreUse(1e-9, 101.0, 50.0)) == 1.0
    assert share_of_others(begin, CoreUse(1.0, 100.4, 51.0)) == 0.0
    assert share_of_others(begin, begin) == 0.0
