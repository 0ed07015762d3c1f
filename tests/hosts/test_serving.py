"""A serving host in the middle of a run: grants end with its guard, and users are served when its cable is pulled."""

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
from ebbtide.types.grants import GRANT_S
from tests.hosts.cluster import GUARD_PORT, SCRIPTED, Cluster
from tests.hosts.run import ShortRun
from tests.support.waiting import wait_until

#: Requests that are served before something is believed.
_SERVED: Final = 20
#: Steps of the borrowed engine that show that it runs, and attempts of users for which it has to stand still.
_STEPS, _ATTEMPTS = 10, 5
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


def page_of(cluster: Cluster) -> Page:
    """Opened anew, as a new guard may make another."""
    return Page(page_path(cluster.grants, "serving"))


async def lends(cluster: Cluster) -> None:
    """Wait until the guard has a budget for the borrowed engine, and the engine makes steps in it."""
    page = page_of(cluster)
    await wait_until(lambda: page.offered().tokens, timeout=90, what="a budget")
    began = page.steps().steps
    await wait_until(lambda: page.steps().steps >= began + _STEPS, timeout=90, what="steps of the borrowed engine")


async def test_a_serving_host_lends_nothing_without_its_guard_and_serves_its_users_while_it_is_cut_off(
    cluster: Cluster, run: ShortRun
) -> None:
    await cluster.boot(**SCRIPTED)
    await cluster.serve_users(**SCRIPTED)
    with users_of(cluster) as users:
        await users.served(1)
        run.submit(steps=40)
        await wait_until(lambda: cluster.ledger("serving"), timeout=120, interval=0.1, what="tokens on borrowed time")
        await lends(cluster)

        page = page_of(cluster)
        cluster.process["guard"].kill()
        await wait_until(lambda: not page.offered().tokens, timeout=GRANT_S + 1, what="the budget ends by itself")
        await wait_until(lambda: not page.steps().stepping, what="the step under way ends")
        stood, again = page.steps().steps, users.account.again
        await wait_until(lambda: users.account.again >= again + _ATTEMPTS, what="users find no guard, again and again")
        assert page.steps().steps == stood
        await cluster.guard()
        await users.served(_SERVED)
        await lends(cluster)

        cluster.network.cut("serving")
        await wait_until(
            lambda: cluster.logged("serving", "detached"), timeout=60, interval=0.1, what="the borrower is alone"
        )
        again = users.account.again
        await users.served(_SERVED)
        assert users.account.again == again, "none of them has noticed"
        cluster.network.mend("serving")
        await run.ended()
        assert run.interruptions() > 0
        users.process.terminate()
        await wait_until(lambda: users.process.poll() is not None, timeout=60, interval=0.1, what="users leave")
        assert users.account.ended == users.account.sent
