"""`ebbtide health` ends with a status that supervisors understand, and in one line."""

import pytest

from ebbtide.cli.health import main


def test_a_server_that_is_not_there_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EBBTIDE_TOKEN", "secret")
    with pytest.raises(SystemExit) as ended:
        main(["--address", "unix:/nonexistent"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("address", ["nowhere", "192.0.2.1:7600"])
def test_an_address_that_may_not_be_asked_is_status_2(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_TOKEN", "secret")
    monkeypatch.delenv("EBBTIDE_ALLOW_INSECURE", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["--address", address])
    assert ended.value.code == 2


def test_without_a_token_it_is_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EBBTIDE_TOKEN", "EBBTIDE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["--address", "127.0.0.1:7600"])
    assert ended.value.code == 2
