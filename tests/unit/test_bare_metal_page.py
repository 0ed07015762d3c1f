"""What the page about bare metal names is there; `make test-bare` follows it."""

import re

from ebbtide.cli.credentials.host_papers import parse_hosts
from tests.bare.admin import ROOT
from tests.bare.page import ADMIN, PAGE, blocks

HOSTS = {"control", "relay", "trainer", "gateway", "worker", "serving"}


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


def test_every_unit_is_installed_by_the_page() -> None:
    units = {path.name for path in (ROOT / "deploy" / "systemd").glob("ebbtide-*.*") if path.is_file()}
    assert not {name for name in units if f"/{name}" not in PAGE.read_text()}


def test_the_page_has_at_most_a_thousand_words_beside_its_commands() -> None:
    assert len(re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL).split()) <= 1000


def test_every_host_of_the_page_gets_papers_and_keys() -> None:
    text = PAGE.read_text()
    (line,) = re.findall(r"^ebbtide certs hosts --dir \$KEYS (.+)$", text, re.MULTILINE)
    assert set(parse_hosts(line.split())) == {*HOSTS, ADMIN}
    assert f'HOSTS="{" ".join(parse_hosts(line.split())).removesuffix(f" {ADMIN}")}"' in text
