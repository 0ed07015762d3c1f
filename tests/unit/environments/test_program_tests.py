"""Programs that a policy wrote: what they pass, and that they cost only themselves."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from ebbtide.environments.program_tests import ProgramLimits, passed_share
from ebbtide.environments.rewards import load_reward

LIMITS = ProgramLimits(seconds=20.0, memory_bytes=1 << 30)
ASSERTS = ["assert f(1) == 2", "assert f(2) == 3"]
SAYS_SO = """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'{"loaded": true}\\n{"passed": 2, "proof": ""}\\n')
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    ("program", "tests", "share"),
    [
        ("def f(x): return x + 1", ASSERTS, 1.0),
        ("def f(x): return 2", ASSERTS, 0.5),
        ("def f(x): return x + 1", "\n".join(ASSERTS), 1.0),
        ("f = ", ASSERTS, 0.0),
        ("print(int(input()) * 2)", [{"input": "4\n", "output": "8"}, {"input": "5", "output": "11"}], 0.5),
        ("print(input()[::-1])", {"inputs": ["ab", "cd"], "outputs": ["ba\n", "dc"]}, 1.0),
        ("print('8'); raise SystemExit(1)", [{"input": "", "output": "8"}], 0.0),
    ],
)
def test_the_share_of_tests_that_a_program_passes(program: str, tests: Any, share: float) -> None:
    assert passed_share(program, tests, LIMITS) == share


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "raise SystemExit",
        SAYS_SO,
        "def f(x):\n  import os\n  os._exit(0)",
        "x = [0] * 10**12",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ],
)  # fmt: skip
def test_a_program_that_leaves_early_or_says_that_it_passed_passes_nothing(program: str) -> None:
    assert passed_share(program, ASSERTS, LIMITS) == 0.0


def test_a_program_ends_at_its_time_and_what_it_started_with_it(tmp_path: Path) -> None:
    lasting = tmp_path / "pid"
    program = (
        "import os, time\n"
        "if not os.fork():\n"
        "  os.setsid()\n"
        "  if os.fork(): os._exit(0)\n"
        f"  open({str(lasting)!r}, 'w').write(str(os.getpid()))\n"
        "  time.sleep(600)\n"
        f"while not os.path.exists({str(lasting)!r}): pass\n"
        "while True: pass"
    )
    began = time.monotonic()
    assert passed_share(program, ASSERTS, ProgramLimits(seconds=2.0, memory_bytes=1 << 30)) == 0.0
    assert time.monotonic() - began < 20.0
    with pytest.raises(ProcessLookupError):
        os.kill(int(lasting.read_text()), 0)


def test_the_last_block_of_a_response_is_the_program() -> None:
    response = "First\n```python\ndef f(x): return 0\n```\nno:\n```python\ndef f(x): return x + 1\n```\nDone."
    assert load_reward("code", {})(response, ASSERTS, {}) == 1.0
    assert load_reward("code", {})("def f(x): return 2", ASSERTS, {}) == 0.0
    assert load_reward("code", {"partial_credit": True})("def f(x): return 2", ASSERTS, {}) == 0.5


@pytest.mark.parametrize("tests", [None, 3, [], [1], [{"input": "x"}], {"inputs": ["x"], "outputs": []}])
def test_an_answer_without_tests_is_an_error_and_no_reward_of_zero(tests: Any) -> None:
    with pytest.raises(ValueError, match=r"holds no tests|argument"):
        passed_share("x = 1", tests, LIMITS)
