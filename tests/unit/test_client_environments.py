"""`make test-clients` installs clients, runs their scripts, records what they send, and says what failed."""

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import __main__ as command
from tests.clients import environments
from tests.clients.environments import ClientPlan, Failed, made_environment, played
from tests.clients.page import ClientRow, table
from tests.clients.recorder import recording
from tests.clients.stand import Stand
from tests.support.waiting import wait_until

PLAN = ClientPlan(name="one", script="with_one.py", pins=("one==1.0",))
STAND = Stand("http://127.0.0.1:9", "secret", "run-1", Path("model"))


def script(folder: Path, text: str) -> ClientPlan:
    """A client whose script is for the shell."""
    path = folder / "script.sh"
    path.write_text(text)
    return ClientPlan(name="one", script=str(path))


async def test_a_script_that_does_not_end_is_killed_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "_RUN_S", 2.0)
    log = tmp_path / "log.txt"
    log.write_text("of the run before")
    lines = played(script(tmp_path, "sleep 600 & echo $!; wait"), Path("/bin/sh"), STAND, tmp_path)
    assert lines == [{"failed": "did not end within 2 s"}]
    child = Path("/proc") / log.read_text().strip() / "cmdline"
    await wait_until(lambda: not child.exists() or not child.read_bytes())


def test_a_scripts_environment_has_no_proxy_and_its_last_error_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "all_proxy", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "x")
    lines = played(script(tmp_path, "env; echo an error; exit 3"), Path("/bin/sh"), STAND, tmp_path)
    assert lines == [{"failed": "an error"}]
    names = {line.partition("=")[0] for line in (tmp_path / "log.txt").read_text().splitlines()}
    assert "EBBTIDE_URL" in names
    assert not names & {"HTTPS_PROXY", "all_proxy", "OPENAI_API_KEY"}


def test_an_installation_that_fails_is_told_in_plain_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_CACHE", tmp_path)

    def fails(*_: Any) -> None:
        raise Failed("ERROR: no match at https://packages.example/simple")

    monkeypatch.setattr(environments, "_run", fails)
    with pytest.raises(Failed, match=r"^its packages could not be installed$"):
        made_environment(PLAN)


@pytest.mark.parametrize(("flags", "status"), [([], 1), (["--allow-missing"], 0)])
def test_a_client_that_is_missing_fails_the_test_unless_it_may(
    monkeypatch: pytest.MonkeyPatch, flags: Sequence[str], status: int
) -> None:
    async def rows(*_: Any) -> list[ClientRow]:
        return [command.missing_row(PLAN, "its packages could not be installed")]

    monkeypatch.setattr(command, "_rows", rows)
    assert command.main(flags) == status


def test_a_wrong_answer_fails_the_test_whatever_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rows(*_: Any) -> list[ClientRow]:
        return [ClientRow(client="one", version="1", ran="chat", result="wrong", right=False)]

    monkeypatch.setattr(command, "_rows", rows)
    assert command.main(["--allow-missing"]) == 1


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("no answer of http://127.0.0.1:8000/v1: refused", "no answer of ... refused"),
        ("cannot reach host.internal:443 or 10.0.0.1", "cannot reach ... or ..."),
        ("host.internal is not on the loopback", "... is not on the loopback"),
        ("no file '/home/me/.cache/x.py'", "no file '...'"),
        ("openai.BadRequestError: 400 and/or 3/4", "openai.BadRequestError: 400 and/or 3/4"),
    ],
)
def test_the_table_tells_nothing_of_the_machine(result: str, shown: str) -> None:
    row = ClientRow(client="one", version="1", ran="chat", result=result, right=False)
    assert table([row]).endswith(f"| {shown} |")


def test_a_recorder_passes_keys_on_and_keeps_none(tmp_path: Path) -> None:
    seen = list[dict[str, str]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stand = Stand(f"http://127.0.0.1:{server.server_port}", "secret", "run-1", tmp_path)
        with recording(stand, tmp_path / "bodies.json") as between:
            headers = {"x-api-key": "secret", "Authorization": "Bearer secret", "x-own": "kept"}
            httpx.post(f"{between.url}/v1/messages", json={"model": "m"}, headers=headers, trust_env=False)
        server.shutdown()
    assert (seen[0]["x-api-key"], seen[0]["authorization"]) == ("secret", "Bearer secret")
    (kept,) = json.loads((tmp_path / "bodies.json").read_text())
    assert (kept["body"], kept["headers"]["x-own"]) == ({"model": "m"}, "kept")
    assert "secret" not in json.dumps(kept)
