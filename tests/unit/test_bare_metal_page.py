"""What the page about bare metal names is there; `make test-bare` follows it."""

import re

from tests.bare.admin import ROOT
from tests.bare.page import ADMIN, PAGE, blocks

HOSTS = {"control", "relay", "trainer", "gateway", "worker"}


def test_the_page_has_commands_for_every_host_and_for_who_installs() -> None:
    found = blocks(PAGE.read_text())
    assert {host for block in found for host in block.hosts} == {*HOSTS, ADMIN}
    assert len(found) == PAGE.read_text().count("\n# on "), "a block that is not followed"


def test_every_file_of_the_checkout_that_the_page_copies_is_there() -> None:
    text = "\n".join(block.commands for block in blocks(PAGE.read_text()))
    copied = set(re.findall(r"/root/ebbtide/(systemd/[\w@.-]+)", text))
    assert len(copied) > 8
    assert all((ROOT / "deploy" / name).exists() for name in copied), copied
    assert all((ROOT / name).exists() for name in re.findall(r"\b(?:deploy|requirements)/[\w./-]+", text))


def test_every_unit_is_installed_by_the_page_but_that_of_serving_hosts() -> None:
    units = {path.name for path in (ROOT / "deploy" / "systemd").glob("*.service")}
    missing = {name for name in units if f"/{name}" not in PAGE.read_text()}
    assert missing == {"ebbtide-serving-guard.service"}
