"""A serving host whose cable is pulled in the middle of a run: users are served, and grants end with the guard."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import pytest

from ebbtide.demo.coserving.steady_users import UsersAccount
from ebbtide.grants import Page, page_path
from ebbtide.testing import wait_until
from ebbtide.types.grants import GRANT_S
from tests.hosts.cluster import GUARD_PORT, SCRIPTED, Cluster
from tests.hosts.run import ShortRun

#: Steps of the test's own engine; the borrowed one makes as many tokens as its budget lets it.
_SERVED: Final = 20
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(420)]


class Users:
    """They are on the serving host, and ask its guard."""

    def __init__(self, out: Path, process: "subprocess.Popen[bytes]") -> None:
        self._out, self.process = out, process

    @property
    def account(self) -> UsersAccount:
        if not self._out.exists():
            return UsersAccount()
        return msgspec.json.decode(self._out.read_bytes(), type=UsersAccount)

    async def served(self, more: int) -> None:
        """Wait until so many more requests have ended."""
        ended = self.account.ended
        await wait_until(lambda: self.account.ended >= ended + more, timeout=90, interval=0.1, what="users are served")


@contextmanager
def users_of(cluster: Cluster) -> Iterator[Users]:
    out = cluster.directory / "users.json"
    url = f"http://127.0.0.1:{GUARD_PORT}"
    words = ("--url", url, "--model", "m", "--every-s", "0.5", "--out", str(out))
    command = cluster.network.on("serving", sys.executable, "-m", "ebbtide.demo.coserving.steady_users", *words)
    with subprocess.Popen(command, env=cluster.environment("serving"), stdout=subprocess.DEVNULL) as process:
        try:
            yield Users(out, process)
        finally:
            process.kill()


async def running(cluster: Cluster) -> int:
    """Rollouts of the borrowed worker, as the guard's screen has them."""
    words = ("-m", "ebbtide.cli", "guard", "status", "--json", "--grant-dir", str(cluster.grants))
    shown = await cluster.ask("serving", *words, identity="serving")
    assert shown.returncode == 0, shown.stderr
    return sum(one["running"] for one in json.loads(shown.stdout)["borrowers"])


async def test_a_serving_host_that_is_cut_off_serves_its_users_and_lends_to_nobody_without_its_guard(
    cluster: Cluster, run: ShortRun
) -> None:
    await cluster.boot(**SCRIPTED)
    await cluster.serve_users(**SCRIPTED)
    with users_of(cluster) as users:
        await users.served(1)
        run.submit(steps=30)
        await wait_until(lambda: cluster.ledger("serving"), timeout=120, interval=0.1, what="tokens on borrowed time")
        cluster.network.cut("serving")
        await wait_until(
            lambda: cluster.logged("serving", "detached"), timeout=60, interval=0.1, what="the borrower is alone"
        )
        await users.served(_SERVED)
        assert users.account.again == 0, "none of them has noticed"

        page = Page(page_path(cluster.grants, "serving"))
        cluster.process["guard"].kill()
        await wait_until(lambda: not page.budget().tokens, timeout=GRANT_S + 1, what="the grant ends by itself")
        stood = page.steps().steps
        await cluster.guard()
        await users.served(_SERVED)
        assert page.steps().steps >= stood
        cluster.network.mend("serving")
        await run.ended()
        assert run.interruptions() > 0
        users.process.terminate()
        await wait_until(lambda: users.process.poll() is not None, timeout=60, interval=0.1, what="users leave")
        assert users.account.ended == users.account.sent
